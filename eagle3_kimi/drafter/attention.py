"""Attention of the training-time test: exact, and linear in memory.

At step k a row attends to the keys of step 0 up to its own, and to one key of each of the steps 1..k at its own row:

             step-0 keys          step 1           step 2
    row 0    x . . .              x . . .          x . . .
    row 1    x x . .              . x . .          . x . .
    row 2    x x x .              . . x .          . . x .
    row 3    x x x x              . . . x          . . . x

The right-hand blocks are diagonals: k scores a row, not a matrix. So the attention is causal flash attention over the
step-0 keys, merged with those scores by log-sum-exp. Queries are the supervised rows alone, the last ones of their
document.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from eagle3_kimi.drafter import flash_cpu, flash_cuda
from eagle3_kimi.drafter.rows import Document


def attend(
    q: Tensor, keys: Tensor, values: Tensor, later: list[tuple[Tensor, Tensor]], documents: tuple[Document, ...]
) -> Tensor:
    """Output [M_k, N, C] of step k = len(later).

    Args:
        q: [M_k, N, C] queries of the supervised rows that step k has, rotated.
        keys: [T, Nkv, C] of step 0, all rows, rotated.
        values: [T, Nkv, C] of step 0.
        later: keys and values [M_k, Nkv, C] of the steps 1..k at the same rows.
        documents: the layout; step k has `supervised - k` rows of each.
    """
    diagonals = [tensor for pair in later for tensor in pair]
    return cast(Tensor, _MergedAttention.apply(q, keys, values, documents, *diagonals))


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, documents: tuple[Document, ...], *diagonals: Tensor
    ) -> Tensor:
        flash = flash_cuda if q.is_cuda else flash_cpu
        out, lse = flash.forward(q, keys, values, documents, step=len(diagonals) // 2)
        if diagonals:
            scores = _diagonal_scores(q, diagonals[0::2])
            merged = torch.logaddexp(lse, scores.logsumexp(dim=-1))
            out = out * flash_cpu.weigh(lse, merged, q)
            for score, value in zip(scores.unbind(-1), diagonals[1::2], strict=True):
                out += flash_cpu.weigh(score, merged, q) * _expand(value, q)
            lse = merged
        ctx.documents = documents
        ctx.save_for_backward(q, keys, values, out, lse, *diagonals)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, out, lse, *diagonals = ctx.saved_tensors
        grad = grads[0].contiguous()
        flash = flash_cuda if q.is_cuda else flash_cpu
        grad_q, grad_keys, grad_values = flash.backward(
            grad, q, keys, values, out, lse, ctx.documents, step=len(diagonals) // 2
        )
        grad_diagonals: list[Tensor] = []
        if diagonals:
            scale = q.shape[-1] ** -0.5
            correction = (grad.float() * out.float()).sum(-1)
            scores = _diagonal_scores(q, diagonals[0::2])
            for score, key, value in zip(scores.unbind(-1), diagonals[0::2], diagonals[1::2], strict=True):
                probability = (score - lse).exp()
                along = (grad.float() * _expand(value, q).float()).sum(-1)
                grad_score = (scale * probability * (along - correction)).to(q.dtype)[..., None]
                grad_q += grad_score * _expand(key, q)
                grad_diagonals.append(_fold(grad_score * q, key))
                grad_diagonals.append(_fold(probability.to(q.dtype)[..., None] * grad, value))
        return grad_q, grad_keys, grad_values, None, *grad_diagonals


def _diagonal_scores(q: Tensor, keys: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """Scores float32 [M, N, k] of each row with its own key of each later step."""
    scale = q.shape[-1] ** -0.5
    return torch.stack([(q.float() * _expand(key, q).float()).sum(-1) * scale for key in keys], dim=-1)


def _expand(x: Tensor, q: Tensor) -> Tensor:
    """[M, Nkv, C] -> [M, N, C]: each key head serves N / Nkv query heads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _fold(grad: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_expand`: sums over the query heads of each key head."""
    if grad.shape == like.shape:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(dim=2)
