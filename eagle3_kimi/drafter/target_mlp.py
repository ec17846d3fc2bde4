"""An MLP of the target that the drafter's own can start from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eagle3_kimi.target import Target

_PLACES = ("mlp", "mlp.shared_experts")
"""A dense layer's MLP; in a layer of experts, the ones that see every token."""


@dataclass(frozen=True, kw_only=True)
class TargetMLP:
    """SwiGLU with the norm before it, in float32; F channels."""

    norm: Tensor
    """[H]."""
    gate: Tensor
    """[F, H]."""
    up: Tensor
    """[F, H]."""
    down: Tensor
    """[H, F]."""

    @classmethod
    def read(cls, target: Target, layer: int) -> TargetMLP | None:
        """Of decoder layer `layer` (0-based); None where it has none as plain tensors."""
        if target.config.get("hidden_act", "silu") != "silu":
            return None
        names = {name.removeprefix("language_model.") for name in target.tensor_files}
        prefix = f"model.layers.{layer}"
        for place in _PLACES:
            parts = [f"{prefix}.{place}.{part}_proj.weight" for part in ("gate", "up", "down")]
            if names >= {*parts}:
                gate, up, down = (target.read_named_tensor(part).float() for part in parts)
                norm = target.read_named_tensor(f"{prefix}.post_attention_layernorm.weight").float()
                return cls(norm=norm, gate=gate, up=up, down=down)
        return None
