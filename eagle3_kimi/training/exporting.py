"""A drafter directory from a training checkpoint, without the run around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.export import Format, write_drafter
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.target import Target, resolve_target
from eagle3_kimi.training.checkpoint import STATE_NAME


def export_checkpoint(
    checkpoint: Path,
    out_dir: Path,
    *,
    target: str | None = None,
    dtype: str | None = None,
    format: Format = "eagle3",
    trust_remote_code: bool = False,
) -> Path:
    """Writes the drafter of a checkpoint; the step folder that it came from.

    Args:
        checkpoint: a step folder, or a run's folder, whose newest step is taken.
        out_dir: replaced if it exists.
        target: the target the run named, if it now lies elsewhere.
        dtype: of the written weights; the target's own by default.
        format: `eagle3` (vLLM and SGLang) or `speculators` (vLLM).
        trust_remote_code: lets the target's own tokenizer code run.

    Raises:
        UsageError: there is no checkpoint.
        DataError: the target is not the one it was trained for, the weights are sharded, or the result would not serve.
    """
    folder = find_checkpoint(checkpoint)
    state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    if "drafter" not in state:
        raise DataError(
            f"{folder} is another trainer's checkpoint: its {STATE_NAME} describes no drafter; export it with that "
            "trainer, and then `eagle3-kimi convert` it"
        )
    found = resolve_target(target or state["target"], trust_remote_code=trust_remote_code)
    _check_target(found, state, folder)
    tensors = {name.removeprefix("draft_model."): tensor for name, tensor in _load_weights(folder).items()}
    config = {**state["drafter"], "aux_layer_ids": tuple(state["drafter"]["aux_layer_ids"])}
    write_drafter(DrafterConfig(**config), tensors, out_dir, target=found, dtype=dtype, format=format)
    return folder


def find_checkpoint(path: Path) -> Path:
    """A step folder: `path` itself, or the newest below it (of a run, or of its `checkpoints`).

    Raises:
        UsageError: there is none.
    """
    if (path / STATE_NAME).is_file():
        return path
    below = [*path.glob(f"step-*/{STATE_NAME}"), *path.glob(f"checkpoints/step-*/{STATE_NAME}")]
    if not below:
        raise UsageError(f"{path} is no checkpoint: expected a folder step-NNNNNN with {STATE_NAME}, or a run with one")
    return max(below).parent


def _load_weights(folder: Path) -> dict[str, Tensor]:
    """The model's state as Accelerate saved it: safetensors, or one whole file of tensors under FSDP."""
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    whole = folder / "pytorch_model_fsdp.bin"
    if whole.is_file():
        return dict(torch.load(whole, map_location="cpu", weights_only=True, mmap=True))
    raise DataError(
        f"{folder} holds neither model.safetensors nor {whole.name}: under FSDP, train with fsdp_state_dict_type "
        "FULL_STATE_DICT, as accelerate_configs/8gpu_fsdp2.yaml does"
    )


def _check_target(target: Target, state: dict[str, Any], folder: Path) -> None:
    if target.revision != state["target_revision"]:
        raise DataError(
            f"{folder} was trained for {state['target']} of revision {state['target_revision']}, not for "
            f"{target.name} of revision {target.revision}; name its own target with --target"
        )
