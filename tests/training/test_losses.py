from __future__ import annotations

import pytest
import torch

from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.training.head_loss import compute_head_loss
from eagle3_kimi.training.metrics import Counts, count_joint_hits, pack_counts
from eagle3_kimi.training.objectives import OBJECTIVES, soft_cross_entropy
from eagle3_kimi.training.targets import StateTargets


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_closed_form_gradients(name: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    p = torch.randn(6, 9, dtype=torch.float64).softmax(-1)
    q = logits.softmax(-1)
    acceptance = torch.minimum(p, q).sum(-1)
    expected = {
        "cross_entropy": -(p * q.log()).sum(-1),
        "total_variation": 1 - acceptance,
        "log_acceptance": -acceptance.log(),
    }[name]

    loss, grad = OBJECTIVES[name](logits.detach(), p)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0])


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_head_loss_equals_autograd_over_full_logits(chunk: int) -> None:
    torch.manual_seed(1)
    rows = PackedRows.build([(2, 5), (1, 1), (0, 3)], ttt_steps=3)
    states = [torch.randn(len(step), 8, requires_grad=True) for step in rows.steps]
    head = torch.randn(6, 8, requires_grad=True)
    target_states, target_head = torch.randn(9, 8), torch.randn(6, 8)
    valid = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1]).bool()
    weights = [0.5, 0.3, 0.2]

    loss, predictions = compute_head_loss(
        states, head, StateTargets(target_states, target_head), valid, rows,
        step_weights=weights, objective=soft_cross_entropy, chunk=chunk,
    )  # fmt: skip
    p = (target_states @ target_head.T).softmax(-1)
    expected = torch.zeros(())
    for step, state in enumerate(states):
        targets = rows.targets(step)
        row_loss = -(p[targets] * (state @ head.T).log_softmax(-1)).sum(-1)
        expected = expected + weights[step] * (row_loss * valid[targets]).sum()
        assert torch.equal(predictions[step], (state @ head.T).argmax(-1))

    torch.testing.assert_close(loss, expected)
    ours = torch.autograd.grad(loss * 2.5, [head, *states])
    theirs = torch.autograd.grad(expected * 2.5, [head, *states])
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference)


def test_chains_break_at_the_first_miss() -> None:
    rows = PackedRows.build([(1, 3), (1, 2)], ttt_steps=3)
    hits = [
        torch.tensor([1, 1, 0, 1, 0]).bool(),  # rows 0 1 2 | 3 4
        torch.tensor([0, 1, 1]).bool(),  # rows 0 1 | 3: row 0 breaks here
        torch.tensor([1]).bool(),  # row 0: a hit after a miss is none
    ]
    assert [int(count) for count in count_joint_hits(hits, rows)] == [3, 2, 0]

    vector = pack_counts(torch.tensor(8.0), torch.tensor(4), 11, hits, rows)
    counts = Counts.unpack(vector + vector)  # two ranks
    assert (counts.loss, counts.tokens, counts.chains) == (2.0, 22, (10, 6, 2))
    assert counts.acceptance == (3 / 5, 2 / 3, 0.0)
    assert counts.simulated_acceptance_length == pytest.approx(1 + 3 / 5 + 2 / 3)


def test_counts_without_a_supervised_token() -> None:
    counts = Counts(loss_sum=0.0, supervised_tokens=0.0, tokens=0.0, hits=(0.0,), chains=(0.0,))
    assert (counts.loss, counts.acceptance) == (0.0, (0.0,))
