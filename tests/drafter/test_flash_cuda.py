"""The GPU's way to attend: its kernel stands in for itself on `meta` (shapes, arguments), a reference on a CPU, the real
one where there is a GPU."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eagle3_kimi.drafter import flash_cpu, flash_cuda
from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.errors import EngineError

SIZES = [(4, 6), (0, 3), (5, 1), (2, 0), (1, 8)]
"""Context and supervised rows of the documents: one has no context, one no queries, one none after step 0."""
STEPS = 4


def make_inputs(step: int, dtype: torch.dtype, device: str = "cpu") -> tuple[tuple[Tensor, ...], PackedRows]:
    """Queries, keys, values, and a gradient of the output."""
    rows = PackedRows.build(SIZES, STEPS)
    generator = torch.Generator().manual_seed(step)
    count, total = len(rows.steps[step]), len(rows.positions)
    shapes = [(count, 4, 8), (total, 2, 8), (total, 2, 8), (count, 4, 8)]
    return tuple(torch.randn(s, generator=generator).to(device, dtype) for s in shapes), rows


def attend_densely(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Query i of Q sees the keys up to i + S - Q."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qnc,snc->nqs", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("nqs,snc->qnc", scores.softmax(-1), v), scores.logsumexp(-1)


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, *more: object
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_forward` with variable lengths."""
    assert more[:2] == (0.0, True)
    assert (cum_q.dtype, cum_k.dtype) == (torch.int32, torch.int32)
    assert (max_q, max_k) == (int(cum_q.diff().max()), int(cum_k.diff().max()))
    assert (int(cum_q[-1]), int(cum_k[-1])) == (len(q), len(k))
    pairs = zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist()), strict=True)
    parts = [attend_densely(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in pairs]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=-1), None, None, None


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: object
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_backward`; right only where `out` and `lse` are those of this attention alone."""
    assert lse.is_contiguous()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again, again_lse, *_ = reference_forward(*leaves, *more[:-2])  # type: ignore[arg-type]
    torch.testing.assert_close((again, again_lse), (out, lse))
    return torch.autograd.grad(again, leaves, grad)


@pytest.mark.parametrize("step", range(STEPS))
def test_lengths_and_rows_give_what_the_cpu_computes(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = SimpleNamespace(
        _flash_attention_forward=reference_forward, _flash_attention_backward=reference_backward
    )
    monkeypatch.setattr(flash_cuda, "_aten", reference)
    monkeypatch.setattr(flash_cuda, "_DTYPES", (torch.float32,))
    (q, k, v, grad), rows = make_inputs(step, torch.float32)
    found = flash_cuda.forward(q, k, v, rows.documents, step=step)
    expected = flash_cpu.forward(q, k, v, rows.documents, step=step)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        flash_cuda.backward(grad, q, k, v, *found, rows.documents, step=step),
        flash_cpu.backward(grad, q, k, v, *expected, rows.documents, step=step),
    )


def test_a_step_without_rows_needs_no_kernel() -> None:
    rows = PackedRows.build([(3, 1)], ttt_steps=2)
    q, keys = torch.zeros(0, 4, 8, dtype=torch.bfloat16), torch.ones(4, 2, 8, dtype=torch.bfloat16)
    out, lse = flash_cuda.forward(q, keys, keys, rows.documents, step=1)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))
    grads = flash_cuda.backward(q, q, keys, keys, out, lse, rows.documents, step=1)
    assert [int(grad.count_nonzero()) for grad in grads] == [0, 0, 0]


@pytest.mark.parametrize("step", [0, 2])
def test_the_kernel_takes_the_arguments(step: int) -> None:
    """The operator's own rule for shapes, on tensors without content."""
    (q, k, v, grad), rows = make_inputs(step, torch.bfloat16, "meta")
    out, lse = flash_cuda.forward(q, k, v, rows.documents, step=step)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:2], torch.float32)
    grads = flash_cuda.backward(grad, q, k, v, out, lse, rows.documents, step=step)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_float32_is_refused() -> None:
    (q, k, v, _), rows = make_inputs(0, torch.float32)
    with pytest.raises(EngineError, match=r"bf16, not torch\.float32"):
        flash_cuda.forward(q, k, v, rows.documents, step=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("step", range(STEPS))
def test_on_a_gpu_it_is_what_the_cpu_computes(step: int) -> None:
    (q, k, v, grad), rows = make_inputs(step, torch.bfloat16, "cuda")
    found = flash_cuda.forward(q, k, v, rows.documents, step=step)
    grads = flash_cuda.backward(grad, q, k, v, *found, rows.documents, step=step)
    q, k, v, grad = (x.float().cpu() for x in (q, k, v, grad))
    expected = flash_cpu.forward(q, k, v, rows.documents, step=step)
    for mine, reference in zip(
        (*found, *grads),
        (*expected, *flash_cpu.backward(grad, q, k, v, *expected, rows.documents, step=step)),
        strict=True,
    ):
        torch.testing.assert_close(mine.float().cpu(), reference, rtol=0.02, atol=0.02)
