"""Trains with SpecForge's own command and trainer: `run_specforge.py FIGURES.json train --config ...`.

On a CPU its Triton loss cannot run, so its reference implementation of the same loss takes its place; its target head
is kept in float32, as everything else is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from meter import Meter


def run_on_cpu() -> None:
    """The reference loss, and no bfloat16."""
    from specforge.algorithms.eagle3 import model
    from specforge.core.loss import _compute_loss
    from specforge.modeling.target import target_head

    class ReferenceLoss:
        apply = staticmethod(_compute_loss)

    model.LogSoftmaxLoss = ReferenceLoss
    load = target_head.TargetHead.from_pretrained
    target_head.TargetHead.from_pretrained = lambda *args, **more: load(*args, **more).float()


def measure(figures: Path) -> None:
    """Puts the meter around the loop over all epochs."""
    from specforge.training import controller as module

    meter, controller, core = Meter(), module.TrainerController, module.TrainerCore
    fit, train_step = controller.fit, core.train_step

    def measured_fit(self: Any, data: Any) -> Any:
        meter.start()
        result = fit(self, data)
        meter.save(figures)
        return result

    def measured_step(self: Any, batch: Any, *args: Any, **more: Any) -> Any:
        result = train_step(self, batch, *args, **more)
        meter.step(int(batch.tensors["attention_mask"].sum()))
        return result

    controller.fit, core.train_step = measured_fit, measured_step


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_on_cpu()
    measure(Path(sys.argv[1]))
    from specforge.cli import main

    raise SystemExit(main(sys.argv[2:]))
