"""The target's distribution over the draft vocabulary, from either form in which a feature store keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle3_kimi.hidden_states.topk import TopTargets


class Targets(Protocol):
    """The target at M positions, read in ranges so that only a range's distributions exist at once."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> TargetRange:
        """Positions `start` to `stop`."""
        ...


class TargetRange(Protocol):
    """The target at some positions."""

    def probabilities(self, logits: Tensor, rows: Tensor | None) -> Tensor:
        """float32 [n, D]: what the rows of draft `logits` [n, D] are judged by.

        Args:
            logits: the drafter's.
            rows: int64 [n], each row's place in the range; None: they are its positions, in order.
        """
        ...


@dataclass(frozen=True)
class StateTargets:
    """From final states through the head's rows of the draft vocabulary: the rest is renormalised away."""

    states: Tensor
    """[M, H], after the target's final norm."""
    head: Tensor
    """[D, H]."""

    def __len__(self) -> int:
        return len(self.states)

    def read(self, start: int, stop: int) -> _Dense:
        logits = self.states[start:stop] @ self.head.to(self.states.dtype).T
        return _Dense(torch.softmax(logits.float(), dim=-1))


@dataclass(frozen=True)
class _Dense:
    p: Tensor

    def probabilities(self, logits: Tensor, rows: Tensor | None) -> Tensor:
        return self.p if rows is None else self.p[rows]


@dataclass(frozen=True)
class TopDraftTargets:
    """From the target's k most likely tokens: those outside the draft vocabulary are left out, the others renormalised
    together with the tail.

    Nobody knows how the tail's mass is spread, only how much it is. So it counts as one more class, "none of the k":
    the drafter is asked for as much mass there, spread as it likes. That is what every objective does when the tail
    lies over the other draft tokens in the drafter's own proportions q, which is what `probabilities` gives:

        draft id        7     3     the others j
        p             .60   .25     .15 q_j / (sum of q over the others)

    All of the tail counts as inside the draft vocabulary, which holds the most frequent tokens.
    """

    draft_ids: Tensor
    """int64 [M, k]; D where the token is outside the draft vocabulary."""
    probs: Tensor
    """float32 [M, k], renormalised; 0 outside."""
    tail: Tensor
    """float32 [M], renormalised."""

    @classmethod
    def build(cls, top: TopTargets, draft_to_target: Tensor, vocab_size: int) -> TopDraftTargets:
        """Maps the tokens to draft ids.

        Args:
            top: at M positions.
            draft_to_target: int64 [D], the target's id of each draft id.
            vocab_size: V.
        """
        size = len(draft_to_target)
        to_draft = torch.full((vocab_size,), size, device=draft_to_target.device)
        to_draft[draft_to_target] = torch.arange(size, device=draft_to_target.device)
        draft_ids = to_draft[top.ids.to(torch.int64)]
        inside = draft_ids < size
        probs = top.log_probs.float().exp() * inside
        tail = top.tail_mass * (inside.sum(-1) < size)  # no other draft token is left to carry it
        total = (probs.sum(-1) + tail).clamp_min(torch.finfo(torch.float32).tiny)
        return cls(draft_ids, probs / total[:, None], tail / total)

    def __len__(self) -> int:
        return len(self.tail)

    def read(self, start: int, stop: int) -> TopDraftTargets:
        return TopDraftTargets(self.draft_ids[start:stop], self.probs[start:stop], self.tail[start:stop])

    def probabilities(self, logits: Tensor, rows: Tensor | None) -> Tensor:
        ids, probs, tail = self.draft_ids, self.probs, self.tail
        if rows is not None:
            ids, probs, tail = ids[rows], probs[rows], tail[rows]
        size = logits.shape[-1]
        p = logits.new_zeros(len(logits), size + 1)  # the last column takes what is outside
        p[:, :size] = torch.softmax(logits, dim=-1)
        p.scatter_(1, ids, 0.0)
        others = p.sum(dim=-1).clamp_min_(torch.finfo(p.dtype).tiny)
        p *= (tail / others)[:, None]
        p.scatter_(1, ids, probs)
        return p[:, :size]
