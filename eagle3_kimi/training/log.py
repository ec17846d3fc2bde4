"""metrics.jsonl: one line a logged step, cut back to the checkpoint when a run resumes."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.training.metrics import Counts

logger = logging.getLogger(__name__)


class MetricsLog:
    """Gathers the sums of steps and writes them as lines; the device is asked only when a line is due."""

    def __init__(self, file: Path, first: int, *, active: bool) -> None:
        self.file, self.active = file, active
        self.last: Counts | None = None
        self.supervised_tokens = 0.0
        self._window: list[tuple[int, tuple[str, ...], Tensor]] = []
        self._since = time.perf_counter()
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        kept = [line for line in map(json.loads, lines) if line["step"] <= first]
        train_lines = [line for line in kept if line["split"] == "train"]
        self.supervised_tokens = train_lines[-1]["total_supervised_tokens"] if train_lines else 0.0
        if active:
            write_text(file, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, step: int, ids: tuple[str, ...], totals: Tensor) -> None:
        """Keeps the reduced sums of a step, and the samples this rank had in it."""
        self._window.append((step, ids, totals))

    def write(self, step: int, *, lr: float, total: int) -> None:
        """Writes the line of the steps since the last one.

        Raises:
            RunStopped: one of them had a loss that is not finite.
        """
        vectors = torch.stack([totals for _, _, totals in self._window]).cpu()
        for (bad_step, ids, _), loss in zip(self._window, vectors[:, 0].tolist(), strict=True):
            if not math.isfinite(loss):
                raise RunStopped(
                    f"the loss of step {bad_step} is {loss}; samples on this rank: {', '.join(ids[:8])}... The last "
                    "checkpoint is from before it. Look at those samples, or lower the learning rate"
                )
        self.last = Counts.unpack(vectors.sum(dim=0))
        self.supervised_tokens += self.last.supervised_tokens
        seconds = time.perf_counter() - self._since
        line = {
            "split": "train",
            "lr": lr,
            "tokens_per_second": round(self.last.tokens / max(seconds, 1e-9), 1),
            "total_supervised_tokens": int(self.supervised_tokens),
        }
        self._append(step, self.last, line)
        if self.active:
            left = (total - step) * seconds / len(self._window)
            logger.info(
                "step %d/%d  loss %.4f  simulated acceptance length %.3f  %.0f tokens/s  %.0f s left",
                step, total, self.last.loss, self.last.simulated_acceptance_length, line["tokens_per_second"], left,
            )  # fmt: skip
        self._window, self._since = [], time.perf_counter()

    def write_evaluation(self, step: int, counts: Counts | None) -> None:
        """Writes the line of an evaluation."""
        if counts is not None:
            self._append(step, counts, {"split": "validation"})
        self._since = time.perf_counter()

    def _append(self, step: int, counts: Counts, more: dict[str, Any]) -> None:
        if self.active:
            line = {
                "step": step,
                "loss": counts.loss,
                "acceptance": list(counts.acceptance),
                "simulated_acceptance_length": counts.simulated_acceptance_length,
                "supervised_tokens": int(counts.supervised_tokens),
                **more,
            }
            with self.file.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")


def write_text(file: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
