"""Loss of all steps through both heads, never holding more than a chunk of logits.

A chunk is a range of target positions. Its target distribution is computed once and serves every step (row i of step k
is judged by target position i + k). The draft logits of the chunk become their gradient on the spot and are dropped, so
nothing is recomputed in the backward pass: it only scales what is there.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.training.objectives import Objective
from eagle3_kimi.training.targets import Targets


def compute_head_loss(
    states: list[Tensor],
    head: Tensor,
    targets: Targets,
    valid: Tensor,
    rows: PackedRows,
    *,
    step_weights: list[float],
    objective: Objective,
    chunk: int,
) -> tuple[Tensor, list[Tensor]]:
    """Weighted sum over steps and valid rows of the objective, and each row's most likely draft id.

    Args:
        states: K tensors [M_k, H], the drafter's normed states.
        head: [D, H], the drafter's head.
        targets: the target at the M positions.
        valid: bool [M]: the target's own choice is in the draft vocabulary; other rows are masked.
        rows: the layout.
        step_weights: K weights.
        objective: of `objectives`.
        chunk: target positions at once.

    Returns:
        The loss sum (float32 scalar, not divided by anything) and K tensors int64 [M_k] of draft ids.
    """
    loss, *predictions = cast(
        tuple[Tensor, ...],
        _HeadLoss.apply(head, targets, valid, rows, step_weights, objective, chunk, *states),
    )
    return loss, predictions


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        targets: Targets,
        valid: Tensor,
        rows: PackedRows,
        step_weights: list[float],
        objective: Objective,
        chunk: int,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        learning = any(ctx.needs_input_grad)
        weight = head.to(states[0].dtype)
        loss = torch.zeros((), dtype=torch.float32, device=head.device)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if learning else None
        grad_states = [torch.empty_like(state) if learning else state for state in states]
        predictions = [torch.empty(len(state), dtype=torch.int64, device=state.device) for state in states]
        bounds = _chunk_bounds(rows, len(targets), chunk)
        for start, ranges in bounds:
            target_range = targets.read(start, start + chunk)
            size = min(chunk, len(targets) - start)
            for step, (low, high) in enumerate(ranges):
                if low == high:
                    continue
                judges = rows.targets(step)[low:high]
                logits = (states[step][low:high] @ weight.T).float()
                predictions[step][low:high] = logits.argmax(dim=-1)
                p = target_range.probabilities(logits, None if high - low == size else judges - start)
                row_loss, grad = objective(logits, p)
                scale = valid[judges].float() * step_weights[step]
                loss += row_loss @ scale
                if grad_head is not None:  # scaled where it is H wide, not D
                    grad, factor = grad.to(weight.dtype), scale.to(weight.dtype)[:, None]
                    grad_states[step][low:high] = (grad @ weight) * factor
                    grad_head += grad.T @ (states[step][low:high] * factor)
        if learning:
            ctx.save_for_backward(grad_head, *grad_states)
            ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(*predictions)
        return loss, *predictions

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_head, *grad_states = ctx.saved_tensors
        scaled = [(grad * grads[0]).to(grad.dtype) for grad in grad_states]
        return (grad_head * grads[0]).to(ctx.head_dtype), None, None, None, None, None, None, *scaled


def _chunk_bounds(rows: PackedRows, num_targets: int, chunk: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """For each chunk of target positions its start and, for each step, the range of rows judged by it."""
    starts = list(range(0, num_targets, chunk))
    edges = torch.tensor([*starts, num_targets])
    cuts = [torch.searchsorted(rows.targets(step).cpu(), edges).tolist() for step in range(len(rows.steps))]
    return [(start, [(cut[i], cut[i + 1]) for cut in cuts]) for i, start in enumerate(starts)]
