"""The channels of the aux states are of very different size, and `fc` is trained as if they were not.

A few channels of a residual stream are a hundred times as large as the others. AdamW's step is equally long for every
weight, so a step on the column of such a channel moves the fused state a hundred times as far as any other: all of the
training would go into keeping it still. `ChannelRates` makes AdamW's step on column c as long as 1 / size[c]. It is,
exactly, AdamW on states divided by their sizes, with the division inside `fc.weight`, which stays what is served:

    fc.weight x = (fc.weight diag(size)) (x / size)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.quantize import QuantizedStates

_LOOKED_AT = 64
"""Samples that sizes are measured on: thousands of tokens."""


def choose_looked_at(indices: Sequence[int]) -> list[int]:
    """Samples to measure on, spread evenly among `indices`: by the data alone, so that a resumed run finds the same."""
    return list(indices[:: max(1, len(indices) // _LOOKED_AT)])


def measure_channel_sizes(samples: Iterable[FeatureSample]) -> Tensor:
    """Root mean square of each aux channel, float32 [A*H]."""
    squares, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        states = sample.aux_hidden_states
        if isinstance(states, QuantizedStates):
            states = states.decode()
        squares = squares + states.double().square().sum(dim=0)
        count += len(states)
    sizes = (squares / max(count, 1)).sqrt().float()
    return sizes.clamp_min(1e-3 * sizes.median())  # a channel that is always near zero


@dataclass(frozen=True)
class ChannelRates:
    """An optimizer step on `weight` [H, A*H] in units of its inputs."""

    weight: nn.Parameter
    sizes: Tensor
    """float32 [A*H], on the weight's device."""

    def scale_gradient(self) -> None:
        """Becomes the gradient with respect to `weight diag(sizes)`: what is clipped, and what AdamW sees."""
        if self.weight.grad is not None:
            to_local(self.weight.grad).div_(self.sizes)

    @contextmanager
    def measured_step(self) -> Iterator[None]:
        """Around the optimizer's step."""
        weight = to_local(self.weight.detach())
        before = weight.clone()
        yield
        weight.copy_(torch.lerp(before, weight, 1 / self.sizes))


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part: rows are what is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
