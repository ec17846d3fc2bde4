"""The target from its most likely tokens against the target from its final states."""

from __future__ import annotations

import pytest
import torch

from eagle3_kimi.hidden_states.topk import find_best
from eagle3_kimi.training.objectives import OBJECTIVES
from eagle3_kimi.training.targets import StateTargets, TopDraftTargets

V, H, M = 50, 16, 9


def build(k: int, draft: torch.Tensor) -> tuple[StateTargets, TopDraftTargets, torch.Tensor]:
    """Both forms over the draft ids, and the target's full distribution [M, V]."""
    torch.manual_seed(0)
    states, head = torch.randn(M, H), torch.randn(V, H)
    logits = states @ head.T
    top = TopDraftTargets.build(find_best(logits, k).among_all(), draft, V)
    return StateTargets(states, head[draft]), top, logits.softmax(-1)


@pytest.mark.parametrize("draft", [torch.arange(V), torch.arange(3, V, 4)], ids=["all", "reduced"])
def test_with_every_token_kept_both_forms_agree(draft: torch.Tensor) -> None:
    by_state, by_top, _ = build(V, draft)
    logits = torch.randn(M, len(draft))
    expected = by_state.read(0, M).probabilities(logits, None)
    torch.testing.assert_close(by_top.read(0, M).probabilities(logits, None), expected, rtol=1e-2, atol=1e-4)
    rows = torch.tensor([4, 0, 3])
    came = by_top.read(2, 7).probabilities(logits[:3], rows)
    torch.testing.assert_close(came, expected[2 + rows], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_tail_is_one_more_class(name: str) -> None:
    """Gradient of the objective over k + 1 classes: the k tokens, and all others together."""
    k = 6
    _, targets, full = build(k, torch.arange(V))
    logits = torch.randn(M, V, requires_grad=True)
    ids = full.topk(k).indices
    known = full.gather(1, ids)
    p = torch.cat((known, 1 - known.sum(-1, keepdim=True)), -1)
    drafted = logits.softmax(-1).gather(1, ids)
    q = torch.cat((drafted, 1 - drafted.sum(-1, keepdim=True)), -1)
    overlap = torch.minimum(p, q).sum(-1)
    loss = {"cross_entropy": -(p * q.log()).sum(-1), "total_variation": 1 - overlap, "log_acceptance": -overlap.log()}
    expected = torch.autograd.grad(loss[name].sum(), logits)[0]
    _, came = OBJECTIVES[name](logits.detach(), targets.read(0, M).probabilities(logits.detach(), None))
    torch.testing.assert_close(came, expected, rtol=5e-3, atol=5e-4)


def test_tokens_outside_the_draft_vocabulary_are_renormalised_away() -> None:
    """Of the 4 most likely tokens those in the draft vocabulary of 10 stay, and the tail lies on the other drafts."""
    draft = torch.arange(0, V, 5)
    _, targets, full = build(4, draft)
    logits = torch.randn(M, 10)
    p = targets.read(0, M).probabilities(logits, None)
    torch.testing.assert_close(p.sum(-1), torch.ones(M))
    for row in range(M):
        kept = [token for token in full[row].topk(4).indices.tolist() if token % 5 == 0]
        tail = 1 - float(full[row].topk(4).values.sum())
        total = tail + sum(float(full[row, token]) for token in kept)
        for token in kept:
            assert float(p[row, token // 5]) == pytest.approx(float(full[row, token]) / total, rel=2e-3)
        others = [i for i in range(10) if i * 5 not in kept]
        q = logits[row, others].softmax(-1)
        torch.testing.assert_close(p[row, others], tail / total * q, rtol=2e-3, atol=1e-6)


def test_no_tail_where_no_other_draft_token_is_left() -> None:
    _, targets, full = build(V - 1, torch.tensor([int(build(1, torch.arange(V))[2][0].argmax())]))
    assert targets.tail[0] == 0
    assert targets.read(0, 1).probabilities(torch.randn(1, 1), None).tolist() == [[1.0]]
    assert full.shape == (M, V)
