"""Checkpoints: whole or absent, rotated, and refused for another run."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from eagle3_kimi.errors import UsageError

STATE_NAME = "trainer_state.json"


def save_checkpoint(
    accelerator: Accelerator, folder: Path, *, step: int, identity: str, keep: int, origin: Mapping[str, Any]
) -> None:
    """Saves `folder`/step-NNNNNN with `Accelerator.save_state` and deletes all but the newest `keep`.

    `origin` says what an export needs to know: target, its revision, and the drafter's configuration.

    The optimizer state is in the format of Accelerate; reading it back goes through `torch.load(weights_only=True)`.
    """
    final, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = {"step": step, "identity": identity, **origin}
        (temporary / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, folder: Path, *, identity: str) -> int:
    """Restores the newest checkpoint; the step it was taken after, 0 if there is none.

    Raises:
        UsageError: it belongs to another run (other data, target, seed, schedule...).
    """
    found = sorted(folder.glob("step-*"))
    if not found:
        return 0
    state = json.loads((found[-1] / STATE_NAME).read_text(encoding="utf-8"))
    if state["identity"] != identity:
        raise UsageError(
            f"{found[-1]} belongs to a run with other data, target or settings, so the loss curve would jump; give "
            "another output folder, or delete this one"
        )
    accelerator.load_state(str(found[-1]))
    return int(state["step"])


def check_rate_continues(saved: float, resumed: float, *, step: int) -> None:
    """Refuses to go on with another learning rate than the one the checkpoint's last step was taken with.

    Raises:
        UsageError: they differ: the schedule, or the way it is computed, is not the run's.
    """
    if not math.isclose(saved, resumed, rel_tol=1e-3):
        raise UsageError(
            f"the checkpoint's step {step} was taken with a learning rate of {saved:g}, this run would have had "
            f"{resumed:g} there, so the loss curve would jump; resume with the settings and the version that wrote it"
        )
