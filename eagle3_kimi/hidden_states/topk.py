"""The target's distribution after a token, cut to its most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle3_kimi.hidden_states.tensor_rows import TensorRows


@dataclass(frozen=True, kw_only=True)
class TopTargets(TensorRows):
    """The k most likely tokens at M positions, over the target's full vocabulary at temperature 1."""

    ids: Tensor
    """int32 [M, k], the most likely first: column 0 is the target's own choice."""
    log_probs: Tensor
    """float16 [M, k]: their natural log-probabilities (at most 0.0005 times themselves off)."""
    tail_mass: Tensor
    """float32 [M]: probability of all other tokens together."""

    @property
    def choice(self) -> Tensor:
        """int32 [M]: the target's own choice."""
        return self.ids[:, 0]


@dataclass(frozen=True, kw_only=True)
class BestTokens(TensorRows):
    """The best of some tokens at M positions, before anything is known of the others."""

    ids: Tensor
    """int32 [M, k], the most likely first."""
    logits: Tensor
    """float32 [M, k]; where there are fewer tokens than k, the rest is minus infinity."""
    total: Tensor
    """float32 [M]: logarithm of the sum of the exponentials of all their logits."""

    def among_all(self) -> TopTargets:
        """As probabilities: these tokens were all that there are."""
        log_probs = self.logits - self.total[:, None]
        tail_mass = 1.0 - log_probs.exp().sum(-1)
        return TopTargets(ids=self.ids, log_probs=log_probs.half(), tail_mass=tail_mass.clamp_(0.0, 1.0))

    @classmethod
    def merge(cls, parts: Sequence[BestTokens], k: int) -> BestTokens:
        """The k best of all parts, each with k of its own or all that it has."""
        logits, order = torch.cat([part.logits for part in parts], dim=1).topk(k, dim=-1)
        ids = torch.cat([part.ids for part in parts], dim=1).gather(1, order)
        total = torch.stack([part.total for part in parts]).logsumexp(0)
        return cls(ids=ids, logits=logits, total=total)


def find_best(logits: Tensor, k: int, *, first_id: int = 0) -> BestTokens:
    """float32 [M, V] logits of the tokens from `first_id` on -> their k best, where the logits are."""
    best, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    missing = (0, k - best.shape[-1])
    return BestTokens(
        ids=pad((ids + first_id).to(torch.int32), missing),
        logits=pad(best, missing, value=-torch.inf),
        total=logits.logsumexp(-1),
    )
