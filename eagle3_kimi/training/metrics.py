"""Figures of a run as sums and counts, so that adding them over batches and ranks is exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_kimi.drafter.rows import PackedRows


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over some batches; K training-time-test steps."""

    loss_sum: float
    supervised_tokens: float
    """Target positions whose target token is in the draft vocabulary: what the loss is divided by."""
    tokens: float
    """All tokens of the samples, prompts included."""
    hits: tuple[float, ...]
    """Per step: chains whose first k+1 proposals are all the target's choice."""
    chains: tuple[float, ...]
    """Per step: chains that are long enough to have that step."""

    @classmethod
    def unpack(cls, vector: Tensor) -> Counts:
        """Reads what `pack_counts` wrote, possibly added up."""
        values = vector.tolist()
        steps = (len(values) - 3) // 2
        return cls(
            loss_sum=values[0],
            supervised_tokens=values[1],
            tokens=values[2],
            hits=tuple(values[3 : 3 + steps]),
            chains=tuple(values[3 + steps :]),
        )

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.supervised_tokens, 1.0)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Joint acceptance of each step: the share of chains that reach it unbroken."""
        return tuple(hit / max(chain, 1.0) for hit, chain in zip(self.hits, self.chains, strict=True))

    @property
    def simulated_acceptance_length(self) -> float:
        """Tokens a target forward would yield, bonus token included, if every position started a chain."""
        return 1.0 + sum(self.acceptance)


def pack_counts(loss_sum: Tensor, supervised: Tensor, tokens: int, hits: list[Tensor], rows: PackedRows) -> Tensor:
    """One float64 vector [3 + 2K] of a batch's sums, on the device: nothing waits for it."""
    fixed = torch.tensor([tokens, *(len(step) for step in rows.steps)], dtype=torch.float64, device=loss_sum.device)
    joint = torch.stack(count_joint_hits(hits, rows)).double()
    return torch.cat((loss_sum.detach().double()[None], supervised.double()[None], fixed[:1], joint, fixed[1:]))


def count_joint_hits(hits: list[Tensor], rows: PackedRows) -> list[Tensor]:
    """K counts of the rows whose proposals hit at this step and at every one before it.

    Args:
        hits: K tensors bool [M_k]: the proposal is the target's choice (one outside the draft vocabulary is a miss).
        rows: the layout.
    """
    alive = hits[0]
    counts = [alive.sum()]
    for step in range(1, len(hits)):
        alive = alive[rows.kept(step, of=step - 1)] & hits[step]
        counts.append(alive.sum())
    return counts
