"""Which row of a packed batch is what: the index arithmetic of the training-time test, in one place.

A sample has tokens x_0..x_{S-1}, the first P of them prompt. Row t of step k takes embed(x_{t+1+k}) and predicts
x_{t+2+k}, whose distribution is the target's at position t+1+k. The target itself samples x_P, so chains start at row
P-1: a row is supervised iff t >= P-1 and t+2+k <= S-1. With P = 3 and S = 8:

    t                      0  1 | 2  3  4  5      rows 0..S-3: S-2 of them; 6 and 7 predict nothing
    step 0 takes           x1 x2| x3 x4 x5 x6     rows before P-1 give only keys and values
    step 0 predicts             | x4 x5 x6 x7
    step 1 takes                | x4 x5 x6        one row less each step
    step 1 predicts             | x5 x6 x7
    target position j           | 0  1  2  3      row i of step k has j = i + k

So the M = S-1-P supervised rows, their step-k tokens and their step-k targets are all found at index i + k of arrays
that run over positions P..S-2: exactly what the feature store keeps there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One sample's place in the packed rows: `context` rows that give keys and values, then `supervised` rows."""

    start: int
    context: int
    supervised: int


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of several documents, one after the other, without padding. T rows in all, M of them supervised."""

    documents: tuple[Document, ...]
    positions: Tensor
    """int64 [T], restarting in each document."""
    supervised: Tensor
    """int64 [M], the supervised rows among the T."""
    steps: tuple[Tensor, ...]
    """K tensors int64 [M_k]: the supervised rows that step k has, as indices among the M."""

    @classmethod
    def build(cls, sizes: list[tuple[int, int]], ttt_steps: int) -> PackedRows:
        """Lays out documents of `(context, supervised)` rows for K = `ttt_steps` steps."""
        documents: list[Document] = []
        start = 0
        for context, supervised in sizes:
            documents.append(Document(start, context, supervised))
            start += context + supervised
        first = [0]
        for document in documents:
            first.append(first[-1] + document.supervised)
        return cls(
            documents=tuple(documents),
            positions=_ranges([(0, d.context + d.supervised) for d in documents]),
            supervised=_ranges([(d.start + d.context, d.supervised) for d in documents]),
            steps=tuple(
                _ranges([(i, max(d.supervised - k, 0)) for i, d in zip(first, documents, strict=False)])
                for k in range(ttt_steps)
            ),
        )

    def targets(self, step: int) -> Tensor:
        """int64 [M_k]: for each row of the step, the target position it predicts, among the M."""
        return self.steps[step] + step

    def kept(self, step: int, of: int) -> Tensor:
        """int64 [M_step]: where the rows of `step` stand among the rows of the earlier step `of`."""
        return torch.searchsorted(self.steps[of], self.steps[step])

    def to(self, device: torch.device | str) -> PackedRows:
        """The same layout with its index tensors on `device`."""
        return replace(
            self,
            positions=self.positions.to(device),
            supervised=self.supervised.to(device),
            steps=tuple(step.to(device) for step in self.steps),
        )


def _ranges(ranges: list[tuple[int, int]]) -> Tensor:
    """Concatenates `start, start+1, ..., start+count-1` of each `(start, count)`."""
    parts = [torch.arange(start, start + count) for start, count in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
