"""Eight-bit states against what they stand for, outliers included."""

from __future__ import annotations

import pytest
import torch

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.quantize import QuantizedStates, quantize

A, H = 3, 256


def states_with_outliers(length: int = 40) -> torch.Tensor:
    """Three channels a hundred times the others, and first tokens with larger ones elsewhere: as large models have."""
    torch.manual_seed(0)
    states = torch.randn(length, A, H)
    states[:, :, [7, 90, 201]] *= 100
    states[:2, :, 33] = 5000.0
    return states.flatten(1).bfloat16().float()  # as targets give them


def relative_error(came: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each token and layer, by the norm of what is no outlier."""
    difference, rest = (x.unflatten(1, (A, H)) for x in (came - expected, expected.clone()))
    rest[rest.abs() > 20] = 0
    return difference.norm(dim=-1) / rest.norm(dim=-1)


def test_outliers_do_not_cost_the_other_values_their_precision() -> None:
    states = states_with_outliers()
    with_outliers = quantize(states, num_layers=A, num_outliers=16).decode()
    without = quantize(states, num_layers=A, num_outliers=0).decode()
    # e4m3 has 3 mantissa bits: a relative rounding error uniform in +-1/16 at most, 2.6% root mean square
    assert relative_error(with_outliers, states).max() < 0.06
    assert relative_error(with_outliers, states).median() < 0.03
    assert relative_error(without, states).median() > 0.1


def test_kept_values_are_exact_in_bf16() -> None:
    states = states_with_outliers()
    decoded = quantize(states.bfloat16(), num_layers=A, num_outliers=16).decode(torch.bfloat16)
    large = states.abs() > 20
    assert torch.equal(decoded[large], states.bfloat16()[large])
    assert torch.equal(quantize(states, num_layers=A, num_outliers=H).decode(), states)


def test_a_value_is_its_code_times_its_scale() -> None:
    """Layer 0 of 4 values, 1 outlier: 97 is kept; 0.28 is the largest left, its code 448, so 0.07 has code 112."""
    states = torch.tensor([[0.28, -0.07, 97.0, 0.0]])
    quantized = quantize(states, num_layers=1, num_outliers=1)
    assert quantized.outlier_channels.tolist() == [[[2]]]
    assert quantized.outliers.tolist() == [[[97.0]]]
    assert quantized.scales.item() == pytest.approx(0.28 / 448)
    assert quantized.codes.float().tolist() == [[448.0, -112.0, 0.0, 0.0]]
    torch.testing.assert_close(quantized.decode(), states)


def test_rows_are_joined_and_empty_ones_stay_empty() -> None:
    states = states_with_outliers()
    whole = quantize(states, num_layers=A, num_outliers=4)
    parts = [quantize(part, num_layers=A, num_outliers=4) for part in (states[:7], states[7:7], states[7:])]
    joined = QuantizedStates.cat(parts)
    assert torch.equal(joined.decode(), whole.decode())
    assert parts[1].decode().shape == (0, A * H)
    assert torch.equal(whole.map(lambda rows: rows[:-1]).decode(), whole.decode()[:-1])
    zeros = torch.zeros(2, A * H)
    assert torch.equal(quantize(zeros, num_layers=A, num_outliers=4).decode(), zeros)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_without_a_code_are_refused(bad: float) -> None:
    states = states_with_outliers()
    states[3, 5] = bad
    with pytest.raises(DataError, match="NaN or infinite"):
        quantize(states, num_layers=A, num_outliers=16)
