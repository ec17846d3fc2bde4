"""Figures of a run as sums and counts, so that adding them over batches and ranks is exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.training.spans import SPAN_NAMES

_FIXED = 3


@dataclass(frozen=True, kw_only=True)
class ChainCounts:
    """Chains of proposals, one entry a training-time-test step."""

    hits: tuple[float, ...]
    """Chains whose first k+1 proposals are all the target's choice."""
    reachable: tuple[float, ...]
    """Chains whose first k+1 targets are all in the draft vocabulary: no drafter over it can hit more."""
    chains: tuple[float, ...]
    """Chains that are long enough to have that step."""

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Joint acceptance of each step: the share of chains that reach it unbroken."""
        return _shares(self.hits, self.chains)

    @property
    def simulated_acceptance_length(self) -> float:
        """Tokens a target forward would yield, bonus token included, if every position started a chain."""
        return 1.0 + sum(self.acceptance)

    @property
    def acceptance_ceiling(self) -> float:
        """The simulated acceptance length of a drafter that never errs inside its vocabulary."""
        return 1.0 + sum(_shares(self.reachable, self.chains))


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over some batches."""

    loss_sum: float
    supervised_tokens: float
    """Target positions whose target token is in the draft vocabulary: what the loss is divided by."""
    tokens: float
    """All tokens of the samples, prompts included."""
    total: ChainCounts
    spans: dict[str, ChainCounts]
    """The same chains by the part of the answer they start in (`SPAN_NAMES`)."""

    @classmethod
    def unpack(cls, vector: Tensor) -> Counts:
        """Reads what `pack_counts` wrote, possibly added up."""
        loss_sum, supervised, tokens = vector[:_FIXED].tolist()
        by_span = vector[_FIXED:].view(len(SPAN_NAMES), 3, -1)
        return cls(
            loss_sum=loss_sum,
            supervised_tokens=supervised,
            tokens=tokens,
            total=_read_chains(by_span.sum(dim=0)),
            spans={name: _read_chains(counts) for name, counts in zip(SPAN_NAMES, by_span, strict=True)},
        )

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.supervised_tokens, 1.0)


def pack_counts(
    loss_sum: Tensor,
    supervised: Tensor,
    tokens: int,
    hits: list[Tensor],
    reachable: list[Tensor],
    span_kinds: Tensor,
    rows: PackedRows,
) -> Tensor:
    """One float64 vector [3 + spans * 3 * K] of a batch's sums, on the device: nothing waits for it.

    Args:
        loss_sum: scalar.
        supervised: scalar, target positions inside the draft vocabulary.
        tokens: of the samples.
        hits: K tensors bool [M_k]: the proposal is the target's choice (one outside the draft vocabulary is a miss).
        reachable: K tensors bool [M_k]: the target's choice is in the draft vocabulary.
        span_kinds: int64 [M], of `read_span_kinds`.
        rows: the layout.
    """
    kinds = torch.nn.functional.one_hot(span_kinds, len(SPAN_NAMES)).double()
    every = torch.stack([kinds[step].sum(dim=0) for step in rows.steps], dim=1)
    joint = [count_joint(hits, kinds, rows), count_joint(reachable, kinds, rows), every]
    fixed = torch.stack((loss_sum.detach().double(), supervised.double(), torch.full_like(supervised, tokens).double()))
    return torch.cat((fixed, torch.stack(joint, dim=1).flatten()))


def count_joint(flags: list[Tensor], kinds: Tensor, rows: PackedRows) -> Tensor:
    """float64 [spans, K]: the rows whose flag is set at this step and at every one before it.

    Args:
        flags: K tensors bool [M_k].
        kinds: float64 [M, spans], one-hot.
        rows: the layout.
    """
    alive = flags[0]
    counts = [alive.double() @ kinds]
    for step in range(1, len(flags)):
        alive = alive[rows.kept(step, of=step - 1)] & flags[step]
        counts.append(alive.double() @ kinds[rows.steps[step]])
    return torch.stack(counts, dim=1)


def _read_chains(counts: Tensor) -> ChainCounts:
    hits, reachable, chains = (tuple(row) for row in counts.tolist())
    return ChainCounts(hits=hits, reachable=reachable, chains=chains)


def _shares(part: tuple[float, ...], whole: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a / max(b, 1.0) for a, b in zip(part, whole, strict=True))
