"""Causal attention over packed documents with the flash kernel of CPUs, one document after the other.

`scaled_dot_product_attention` returns no log-sum-exp and its backward takes none, so the aten operators are called
directly. The kernel's causal mask starts at the first key, but the queries are the last rows of their document: so a
document takes two calls, over all of its context and over a causal square, merged by log-sum-exp.

                 context   supervised
    supervised   x x x  |  x . .
                 x x x  |  x x .
                 x x x  |  x x x
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle3_kimi.drafter.rows import Document

_aten = torch.ops.aten


def forward(
    q: Tensor, keys: Tensor, values: Tensor, documents: tuple[Document, ...], *, step: int
) -> tuple[Tensor, Tensor]:
    """Output [M_k, N, C] and log-sum-exp float32 [M_k, N] of the rows of step k over the step-0 keys.

    Args:
        q: [M_k, N, C], `supervised - step` rows of each document.
        keys: [T, Nkv, C]; N is a multiple of Nkv.
        values: [T, Nkv, C].
        documents: the layout.
        step: k; row i of a document's supervised rows sees its keys up to its own.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for rows, context, square in _parts(documents, step):
        part, part_lse = _forward(q[rows], keys[square], values[square], causal=True)
        if context.stop > context.start:
            other, other_lse = _forward(q[rows], keys[context], values[context], causal=False)
            merged = torch.logaddexp(part_lse, other_lse)
            part = part * weigh(part_lse, merged, q) + other * weigh(other_lse, merged, q)
            part_lse = merged
        out[rows], lse[rows] = part, part_lse
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: tuple[Document, ...],
    *,
    step: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, keys, values, given output and log-sum-exp of the *whole* attention.

    The kernel recomputes its probabilities as exp(score - lse) and its correction as sum(grad * out). Fed with the
    merged output and log-sum-exp of several parts, both come out global, and each part's gradient is exact by itself
    (the backward pass of ring attention, arXiv 2310.01889).
    """
    grad_q, grad_keys, grad_values = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for rows, context, square in _parts(documents, step):
        for seen, causal in ((square, True), (context, False)):
            if seen.stop > seen.start:
                heads = (_heads_first(x) for x in (grad[rows], q[rows], keys[seen], values[seen], out[rows]))
                grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *heads, lse[rows].transpose(0, 1)[None], 0.0, causal
                )
                dq, grad_keys[seen], grad_values[seen] = (x[0].transpose(0, 1) for x in grads)
                grad_q[rows] += dq
    return grad_q, grad_keys, grad_values


def weigh(part: Tensor, merged: Tensor, like: Tensor) -> Tensor:
    """[M, N, 1] in the dtype of `like`: what a part of an attention counts in the whole, from both log-sum-exps."""
    return (part - merged).exp().to(like.dtype)[..., None]


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*map(_heads_first, (q, k, v)), 0.0, causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _parts(documents: tuple[Document, ...], step: int) -> Iterator[tuple[slice, slice, slice]]:
    """For each document that the step reaches: its query rows, its context keys, the keys of the causal square."""
    first = 0
    for document in documents:
        count = document.supervised - step
        if count > 0:
            middle = document.start + document.context
            yield slice(first, first + count), slice(document.start, middle), slice(middle, middle + count)
            first += count


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]
