"""Causal attention over packed documents with the flash kernel of NVIDIA GPUs: all documents in one call.

The kernel of variable lengths aligns its causal mask with the last key, which is where the queries are: the last rows
of their document. From step 1 on the last rows of each document have no query, so their keys are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_kimi.drafter.rows import Document
from eagle3_kimi.errors import EngineError

_aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Lengths:
    """Where documents begin among the queries and among the keys that the kernel gets."""

    key_rows: Tensor | None
    """int64: which of the T rows these keys are; None: all."""
    queries: Tensor
    """int32 [documents + 1]."""
    keys: Tensor
    """int32 [documents + 1]."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, documents: tuple[Document, ...], step: int, device: torch.device) -> _Lengths:
        reached = [document for document in documents if document.supervised > step]
        queries = [document.supervised - step for document in reached]
        keys = [document.context + count for document, count in zip(reached, queries, strict=True)]
        rows = [torch.arange(d.start, d.start + count) for d, count in zip(reached, keys, strict=True)]
        whole = step == 0 and len(reached) == len(documents)
        return cls(
            key_rows=None if whole else torch.cat(rows).to(device),
            queries=_offsets(queries, device),
            keys=_offsets(keys, device),
            most_queries=max(queries),
            most_keys=max(keys),
        )

    def pick(self, x: Tensor) -> Tensor:
        return x if self.key_rows is None else x.index_select(0, self.key_rows)

    def put_back(self, x: Tensor, like: Tensor) -> Tensor:
        return x if self.key_rows is None else torch.zeros_like(like).index_copy_(0, self.key_rows, x)


def forward(
    q: Tensor, keys: Tensor, values: Tensor, documents: tuple[Document, ...], *, step: int
) -> tuple[Tensor, Tensor]:
    """As `flash_cpu.forward`.

    Raises:
        EngineError: not a type that the kernel computes in.
    """
    if q.dtype not in _DTYPES:
        raise EngineError(f"flash attention on a GPU computes in bf16, not {q.dtype}; train with precision bf16 there")
    if not len(q):
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    lengths = _Lengths.of(documents, step, q.device)
    out, lse, *_ = _aten._flash_attention_forward(
        q,
        lengths.pick(keys),
        lengths.pick(values),
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        0.0,  # dropout
        True,  # causal
        False,  # no debug mask
    )
    return out, lse.T


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
    """As `flash_cpu.backward`."""
    if not len(q):
        return torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    lengths = _Lengths.of(documents, step, q.device)
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout that is not used
    grad_q, grad_keys, grad_values = _aten._flash_attention_backward(
        grad,
        q,
        lengths.pick(keys),
        lengths.pick(values),
        out,
        lse.T.contiguous(),
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        0.0,
        True,
        random_state,
        random_state.new_empty(0),
    )
    return grad_q, lengths.put_back(grad_keys, keys), lengths.put_back(grad_values, values)


def _offsets(counts: list[int], device: torch.device) -> Tensor:
    """int32: 0, and the sums of the first 1, 2... counts."""
    return torch.tensor([0, *counts]).cumsum(0).to(device=device, dtype=torch.int32)
