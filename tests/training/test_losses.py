from __future__ import annotations

import pytest
import torch

from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.training.head_loss import compute_head_loss
from eagle3_kimi.training.objectives import OBJECTIVES, soft_cross_entropy
from eagle3_kimi.training.targets import StateTargets
from tests.largest_tensor import LargestTensor


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


def test_no_more_logits_than_a_chunk_exist_at_once() -> None:
    """200 rows of each of two steps over 1,000 ids, 16 target positions at a time; the head itself is 1,000 x 8."""
    rows = PackedRows.build([(1, 200)], ttt_steps=2)
    states = [torch.randn(len(step), 8, requires_grad=True) for step in rows.steps]
    head, target_head = torch.randn(1000, 8, requires_grad=True), torch.randn(1000, 8)
    target_states, valid = torch.randn(200, 8), torch.ones(200, dtype=torch.bool)
    with LargestTensor() as largest:
        loss, _ = compute_head_loss(
            states, head, StateTargets(target_states, target_head), valid, rows,
            step_weights=[0.6, 0.4], objective=soft_cross_entropy, chunk=16,
        )  # fmt: skip
        loss.backward()
    assert largest.numel == 16 * 1000
