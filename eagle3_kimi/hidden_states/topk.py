"""The target's distribution after a token, cut to its most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


def find_top_targets(logits: Tensor, k: int) -> TopTargets:
    """float32 [M, V] logits -> their k largest (V if there are fewer), where the logits are."""
    top, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    total = logits.logsumexp(-1, keepdim=True)
    log_probs = top - total
    tail_mass = 1.0 - log_probs.exp().sum(-1)
    return TopTargets(ids=ids.to(torch.int32), log_probs=log_probs.half(), tail_mass=tail_mass.clamp_(0.0, 1.0))
