"""Aux states in eight bits: e4m3 codes with a scale per token and layer, and the largest values apart.

A float of 3 mantissa bits is off by up to 6% whatever its size, so one value that is a hundred times the others
would carry an error larger than they are. Such outliers (a few channels, other ones at the first tokens) are kept in
bf16 with their channel, chosen for each token; their code is zero, and the scale follows the largest value left:

    value    0.3  -0.1  97.0   0.2        codes     0.3/s  -0.1/s   0   0.2/s      s = 0.3 / 448
                                          outliers  (channel 2, 97.0)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.finite import is_finite
from eagle3_kimi.hidden_states.tensor_rows import TensorRows

CODE_DTYPE = torch.float8_e4m3fn
_LARGEST_CODE = torch.finfo(CODE_DTYPE).max
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class QuantizedStates(TensorRows):
    """States of T tokens and A layers of H values; C outliers of each token and layer."""

    codes: Tensor
    """float8_e4m3fn [T, A*H]."""
    scales: Tensor
    """float32 [T, A]: value = code * scale."""
    outlier_channels: Tensor
    """int16 [T, A, C]."""
    outliers: Tensor
    """bfloat16 [T, A, C]."""

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[T, A*H], where the codes are."""
        length, num_layers = self.scales.shape
        if not length:
            return self.codes.to(dtype)
        values = self.codes.view(length, num_layers, -1).to(torch.float32) * self.scales[..., None]
        values.scatter_(2, self.outlier_channels.to(torch.int64), self.outliers.to(torch.float32))
        return values.flatten(1).to(dtype)


def quantize(
    states: Tensor, *, num_layers: int, num_outliers: int, device: torch.device | str = "cpu"
) -> QuantizedStates:
    """[T, A*H] states of any float dtype, on the CPU.

    Args:
        states: the states.
        num_layers: A.
        num_outliers: C.
        device: where the work is done, a few hundred tokens at a time.

    Raises:
        DataError: NaN or infinite values, which have no code.
    """
    parts = (_quantize(part.to(device), num_layers, num_outliers) for part in states.split(_ROWS_AT_ONCE))
    return QuantizedStates.cat([part.to("cpu") for part in parts])


def _quantize(states: Tensor, num_layers: int, num_outliers: int) -> QuantizedStates:
    values = states.float().unflatten(1, (num_layers, -1))
    hidden = values.shape[-1]
    if hidden > torch.iinfo(torch.int16).max:
        raise DataError(
            f"a hidden size of {hidden} has channels that 16 bits cannot number; store these states as bf16"
        )
    if not is_finite(values):
        raise DataError("the states hold NaN or infinite values")
    channels = values.abs().topk(min(num_outliers, hidden), dim=-1).indices
    outliers = values.gather(-1, channels)
    values = values.scatter(-1, channels, 0.0)
    scales = values.abs().amax(-1).div_(_LARGEST_CODE)
    scales[scales == 0] = 1.0
    codes = values.div_(scales[..., None]).clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(CODE_DTYPE)
    return QuantizedStates(
        codes=codes.flatten(1),
        scales=scales,
        outlier_channels=channels.to(torch.int16),
        outliers=outliers.to(torch.bfloat16),
    )
