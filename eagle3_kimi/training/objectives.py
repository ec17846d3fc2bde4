"""What a row of draft logits is trained for, with its gradient in closed form.

Each objective maps draft logits and target probabilities, float32 [n, D], to the loss of each row [n] and its gradient
with respect to the logits [n, D]; q is the draft's distribution, p the target's over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def soft_cross_entropy(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """-sum p log q; gradient q - p."""
    log_q = torch.log_softmax(logits, dim=-1)
    loss = -torch.linalg.vecdot(p, log_q)
    return loss, log_q.exp_().sub_(p)


def total_variation(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): the share of drafts that rejection sampling refuses.

    With b = [q < p]: d/dlogit = -q (b - sum q b).
    """
    q = torch.softmax(logits, dim=-1)
    loss = 1.0 - torch.minimum(p, q).sum(dim=-1)
    below = (q < p).to(q.dtype)
    return loss, q * (torch.linalg.vecdot(q, below)[:, None] - below)


def log_acceptance(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q): total variation with its gradient divided by the acceptance, so that bad rows count too."""
    loss, grad = total_variation(logits, p)
    acceptance = (1.0 - loss).clamp_min(1e-6)
    return -acceptance.log(), grad / acceptance[:, None]


OBJECTIVES: dict[str, Objective] = {
    "cross_entropy": soft_cross_entropy,
    "total_variation": total_variation,
    "log_acceptance": log_acceptance,
}
