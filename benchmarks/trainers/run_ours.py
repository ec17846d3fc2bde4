"""Trains with eagle3-kimi: `accelerate launch run_ours.py FIGURES.json OPTIONS...` is `train_drafter.py OPTIONS...`
with a meter on its loop."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from meter import Meter

from eagle3_kimi.training import trainer

SCRIPT = Path(__file__).resolve().parents[2] / "train" / "train_drafter.py"


def measure(figures: Path) -> None:
    """Puts the meter around `train_drafter`'s loop; export and summary come after it."""
    meter, train, step = Meter(), trainer._Run.train, trainer._Run._step

    def measured_train(run: trainer._Run) -> Any:
        meter.start()
        return train(run)

    def measured_step(run: trainer._Run, number: int, *more: Any) -> Any:
        result = step(run, number, *more)
        meter.step(int(result[0][2]))  # `pack_counts`: loss, supervised tokens, tokens
        if number == len(run.plan):
            meter.save(figures)
        return result

    trainer._Run.train, trainer._Run._step = measured_train, measured_step  # type: ignore[method-assign]


if __name__ == "__main__":
    measure(Path(sys.argv.pop(1)))
    runpy.run_path(str(SCRIPT), run_name="__main__")
