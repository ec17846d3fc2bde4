"""metrics.jsonl and the tracker: one record a logged step, cut back to the checkpoint when a run resumes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.training.metrics import Counts

Track = Callable[[dict[str, float], int], None]
"""Sends figures of a step to whatever draws them."""


class MetricsLog:
    """Gathers the sums of steps and writes them as lines; the device is asked only when a line is due.

    Args:
        file: metrics.jsonl.
        first: the step the run goes on from; later lines are dropped.
        active: whether this rank writes.
        track: takes the same figures.
    """

    def __init__(self, file: Path, first: int, *, active: bool, track: Track) -> None:
        self.file, self.active, self.track = file, active, track
        self.last: Counts | None = None
        self.supervised_tokens = 0.0
        self._window: list[Tensor] = []
        self._since = time.perf_counter()
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        kept = [line for line in map(json.loads, lines) if line["step"] <= first]
        train_lines = [line for line in kept if line["split"] == "train"]
        self.supervised_tokens = train_lines[-1]["total_supervised_tokens"] if train_lines else 0.0
        if active:
            write_text(file, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, totals: Tensor) -> None:
        """Keeps the reduced sums of a step."""
        self._window.append(totals)

    def write(self, step: int, *, lr: float, grad_norm: Tensor) -> Counts:
        """Writes the line of the steps since the last one, and gives their counts."""
        counts = self.last = Counts.unpack(torch.stack(self._window).sum(dim=0).cpu())
        self.supervised_tokens += counts.supervised_tokens
        seconds = time.perf_counter() - self._since
        line = {
            "split": "train",
            "lr": lr,
            "grad_norm": float(grad_norm),
            "tokens_per_second": round(counts.tokens / max(seconds, 1e-9), 1),
            "total_supervised_tokens": int(self.supervised_tokens),
        }
        self._append(step, counts, line)
        self._window, self._since = [], time.perf_counter()
        return counts

    def write_evaluation(self, step: int, counts: Counts | None) -> None:
        """Writes the line of an evaluation."""
        if counts is not None:
            self._append(step, counts, {"split": "validation", **describe_chains(counts)})
        self._since = time.perf_counter()

    def _append(self, step: int, counts: Counts, more: dict[str, Any]) -> None:
        if not self.active:
            return
        line = {
            "step": step,
            "loss": counts.loss,
            "acceptance": list(counts.total.acceptance),
            "simulated_acceptance_length": counts.total.simulated_acceptance_length,
            "supervised_tokens": int(counts.supervised_tokens),
            **more,
        }
        with self.file.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")
        self.track(flatten(line, line["split"]), step)


def describe_chains(counts: Counts) -> dict[str, Any]:
    """The ceiling that the draft vocabulary sets, and everything again for each part of an answer."""
    spans = {
        name: {
            "chains": int(chains.chains[0]),
            "acceptance": list(chains.acceptance),
            "simulated_acceptance_length": chains.simulated_acceptance_length,
            "acceptance_ceiling": chains.acceptance_ceiling,
        }
        for name, chains in counts.spans.items()
        if chains.chains[0]
    }
    return {"acceptance_ceiling": counts.total.acceptance_ceiling, "spans": spans}


def flatten(values: Any, name: str) -> dict[str, float]:
    """`{"a": {"b": [1, 2]}}` -> `{"name/a/b/1": 1, "name/a/b/2": 2}`; what is no number is left out."""
    if isinstance(values, (int, float)):
        return {name: values}
    items: Any = ()
    if isinstance(values, dict):
        items = ((key, value) for key, value in values.items() if key != "step")
    elif isinstance(values, list):
        items = enumerate(values, start=1)
    return {key: value for part, inner in items for key, value in flatten(inner, f"{name}/{part}").items()}


def write_text(file: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
