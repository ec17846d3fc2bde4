"""The flash kernels of each device, with the log-sum-exp they otherwise hide.

`scaled_dot_product_attention` returns no log-sum-exp and its backward takes none, so the aten operators are called
directly. Both directions work on [1, N, S, C] views; grouped queries (N a multiple of the key heads) are native.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_kimi.errors import EngineError

_aten = torch.ops.aten


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q [Q, N, C] over k, v [S, Nkv, C]: output [Q, N, C] and log-sum-exp float32 [Q, N].

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: query i sees keys 0..i; then Q == S.
    """
    q, k, v = (_heads_first(x) for x in (q, k, v))
    if q.is_cuda:
        _check_half(q)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, given the output [Q, N, C] and log-sum-exp [Q, N] of the *whole* attention.

    The kernel recomputes its probabilities as exp(score - lse) and its correction as sum(grad * out). Fed with the
    merged output and log-sum-exp of several parts, both come out global, and each part's gradient is exact by itself
    (the backward pass of ring attention, arXiv 2310.01889).
    """
    grad, q, k, v, out = (_heads_first(x) for x in (grad, q, k, v, out))
    lse = lse.transpose(0, 1)[None]
    if q.is_cuda:
        _check_half(q)
        empty = torch.empty(0, dtype=torch.uint64, device=q.device)  # random state of the dropout that is not used
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, empty, empty
        )
    else:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    grad_q, grad_k, grad_v = (x[0].transpose(0, 1) for x in grads)
    return grad_q, grad_k, grad_v


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _check_half(x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise EngineError(f"flash attention on a GPU computes in bf16, not {x.dtype}; train with precision bf16 there")
