from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle3_kimi.hidden_states.store import FeatureSample
from eagle3_kimi.training.channels import ChannelRates, choose_looked_at, measure_channel_sizes
from eagle3_kimi.training.step import apply_gradients
from tests.training.toy import AUX, HIDDEN, ToyTarget

SIZES = torch.tensor([1.0, 100.0, 0.01])


class ToySamples:
    """Samples of the toy target, the first channel of the aux states a thousand times as large."""

    def __init__(self, count: int) -> None:
        self.samples = [ToyTarget().sample(index, prompt=3, output=9) for index in range(count)]
        self.lengths = [len(sample.token_ids) for sample in self.samples]
        for sample in self.samples:
            assert isinstance(sample.aux_hidden_states, torch.Tensor)
            sample.aux_hidden_states[:, 0] *= 1000

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> FeatureSample:
        return self.samples[i]


def train(inputs: torch.Tensor, start: torch.Tensor, sizes: torch.Tensor | None) -> torch.Tensor:
    """The weight of a linear layer after five steps of AdamW, clipped, towards fixed outputs."""
    weight = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([weight], weight_decay=0.0)
    for _ in range(5):
        (inputs @ weight.T - 1).square().sum().backward()
        apply_gradients(
            [weight],
            optimizer,
            supervised_tokens=torch.tensor(len(inputs)),
            world_size=1,
            max_grad_norm=0.1,
            learning_rate=0.1,
            channel_rates=None if sizes is None else ChannelRates(weight, sizes),
        )
    return weight.detach()


def test_the_steps_are_those_of_adamw_on_states_divided_by_their_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    divided, start = torch.randn(6, 3, generator=generator), torch.randn(2, 3, generator=generator)
    came = train(divided * SIZES, start / SIZES, SIZES)
    torch.testing.assert_close(came * SIZES, train(divided, start, None), rtol=1e-4, atol=1e-5)


def test_without_them_a_large_channel_takes_all() -> None:
    inputs, start = torch.ones(4, 3) * SIZES, torch.zeros(2, 3)
    moved = (train(inputs, start, None) * SIZES).abs().max(dim=0).values
    assert moved[1] > 50 * moved[0]
    moved = (train(inputs, start, SIZES) * SIZES).abs().max(dim=0).values
    assert moved.tolist() == pytest.approx([float(moved[0])] * 3, rel=1e-3)


def test_sizes_are_root_mean_squares_and_never_zero() -> None:
    samples = ToySamples(5)
    samples.samples[0].aux_hidden_states[:] = 0.0
    for sample in samples.samples:
        sample.aux_hidden_states[:, 1] = 0.0
    states = torch.cat([sample.aux_hidden_states for sample in samples.samples])
    sizes = measure_channel_sizes(samples[index] for index in choose_looked_at(range(5)))
    assert sizes.shape == (len(AUX) * HIDDEN,)
    torch.testing.assert_close(sizes[2:], states.square().mean(dim=0).sqrt()[2:])
    assert float(sizes[0]) > 100 * float(sizes.median())
    assert float(sizes[1]) == pytest.approx(1e-3 * float(sizes.median()), rel=0.05)
