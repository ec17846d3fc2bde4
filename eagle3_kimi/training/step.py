"""From summed gradients to an optimizer step, and the guard that stops a run whose sums are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.training.channels import ChannelRates, to_local

_SHOWN_IDS = 16


def apply_gradients(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    supervised_tokens: Tensor,
    world_size: int,
    max_grad_norm: float,
    learning_rate: float,
    channel_rates: ChannelRates | None = None,
) -> Tensor:
    """One optimizer step; the norm of the gradient before clipping (scalar on the device).

    DDP and FSDP average over ranks. What is wanted is the sum over ranks and micro-batches, divided once by the
    supervised tokens of all of them; a step without any is a step with zero gradients.

    Args:
        parameters: all of them, sharded or not.
        optimizer: over the same.
        supervised_tokens: scalar, of all ranks.
        world_size: ranks that were averaged over.
        max_grad_norm: gradients are clipped to it.
        learning_rate: of this step.
        channel_rates: for the weight that fuses the aux states.
    """
    scale = world_size / supervised_tokens.clamp_min(1)
    gradients = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
    if channel_rates is not None:
        channel_rates.scale_gradient()
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    with nullcontext() if channel_rates is None else channel_rates.measured_step():
        optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What is needed to say which samples made a step go wrong."""

    step: int
    loss_sum: Tensor
    """Scalar, of all ranks."""
    grad_norm: Tensor
    """Scalar."""
    micro_batches: list[tuple[tuple[str, ...], Tensor]]
    """This rank's sample ids and loss sums."""


class FiniteGuard:
    """Looks at each step when the next one is under way: the device is never waited for."""

    def __init__(self) -> None:
        self._waiting: StepTrace | None = None

    def add(self, trace: StepTrace) -> None:
        """Checks the step before this one.

        Raises:
            RunStopped: on every rank, with the same sentence.
        """
        previous, self._waiting = self._waiting, trace
        _check(previous)

    def finish(self) -> None:
        """Checks the last step: before its weights are kept."""
        previous, self._waiting = self._waiting, None
        _check(previous)


def _check(trace: StepTrace | None) -> None:
    if trace is None or bool(torch.isfinite(trace.loss_sum) & torch.isfinite(trace.grad_norm)):
        return
    bad = [ids for ids, loss in trace.micro_batches if not bool(torch.isfinite(loss))]
    named = [name for ids in gather_object(bad) for name in ids]
    if named:
        where = "these samples, packed together"
    else:
        where = "the gradients of the step, whose losses are all finite; its samples"
        named = [name for ids in gather_object([ids for ids, _ in trace.micro_batches]) for name in ids]
    more = f" and {len(named) - _SHOWN_IDS} more" if len(named) > _SHOWN_IDS else ""
    raise RunStopped(
        f"step {trace.step}: the loss is {float(trace.loss_sum)}, the gradient's norm {float(trace.grad_norm)}. It "
        f"comes from {where}: {', '.join(named[:_SHOWN_IDS])}{more}. Nothing of this step was saved: look at those "
        "samples, or lower the learning rate, and run the same command again; it goes on from the last checkpoint"
    )
