"""Rotary positions, computed as vLLM's and SGLang's Llama attention compute them (half-split, float32)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError

if TYPE_CHECKING:
    from eagle3_kimi.drafter.config import DrafterConfig

STATIC_SCALINGS = ("linear", "llama3", "yarn")
"""Scalings whose frequencies do not depend on the length of the sequence at hand."""


def build_inverse_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [C/2] and the factor on cosine and sine.

    Raises:
        DataError: the scaling depends on the sequence length, so training could not match serving.
    """
    if config.rope_scaling is None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / config.rope_theta**exponents, 1.0
    kind = str(config.rope_scaling["rope_type"])
    if kind not in STATIC_SCALINGS:
        raise DataError(
            f"rope scaling {kind!r} is not supported in a drafter; known: default, {', '.join(STATIC_SCALINGS)}"
        )
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: dict[str, Any] = {**config.rope_scaling, "rope_theta": config.rope_theta}
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    return frequencies.float(), float(factor)


def compute_rotation(positions: Tensor, inverse_frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [T, 1, C/2] float32, of positions [T]."""
    angles = positions.to(torch.float32)[:, None, None] * inverse_frequencies
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the halves of heads [T, N, C] by `rotation`; keeps the dtype."""
    cos, sin = rotation
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
