"""Trains with speculators' own command and trainer: `run_speculators.py FIGURES.json ARGUMENTS...`.

Its command asks for an accelerator here and there; those places are told of the CPU. Nothing is validated, since
nothing else is, and a checkpoint is written once, after the loop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from meter import Meter


def run_on_cpu() -> None:
    """What `speculators.train` asks of `torch.accelerator`."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cpu")

    torch.accelerator.current_accelerator = current_accelerator  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.accelerator.is_available = lambda: False


def measure(figures: Path) -> None:
    """Puts the meter around the loop over all epochs."""
    from speculators.train import trainer as module

    meter, trainer = Meter(), module.Trainer

    def run_training(self: Any) -> None:
        self.model.to("cpu")
        optimizers_step = self._optimizers_step
        meter.start()

        def counted() -> None:
            optimizers_step()
            meter.step(self.batch_tokens)

        self._optimizers_step = counted
        self.train_loader.collate_fn = CountingCollate(self.train_loader.collate_fn, self)
        for epoch in range(self.config.num_epochs):
            self.train_epoch(epoch)
            if self.config.max_steps and self.global_step >= self.config.max_steps:
                break
        meter.save(figures)
        self.maybe_save_checkpoint("interrupted")

    trainer.run_training = run_training  # type: ignore[method-assign]
    setup_model = trainer.setup_model

    def setup_on_cpu(self: Any) -> None:
        self.local_rank = "cpu"
        setup_model(self)

    trainer.setup_model = setup_on_cpu  # type: ignore[method-assign]


class CountingCollate:
    """Notes how many tokens a batch's samples have; the batch itself has one row fewer of each."""

    def __init__(self, collate: Any, trainer: Any) -> None:
        self.collate, self.trainer = collate, trainer

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        self.trainer.batch_tokens = sum(len(sample["input_ids"]) for sample in samples)
        return self.collate(samples)


if __name__ == "__main__":
    run_on_cpu()
    measure(Path(sys.argv[1]))
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig

    main(TrainConfig.resolve(sys.argv[2:]))
