"""Recomputes the first boundaries from the checkpoint: the anchor of the layer numbering.

The final state cannot show that an aux layer is off by one; the residual stream after layer 0 can,
and the embedding and layer 0 are small and, in Kimi-K2.5, not quantised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eagle3_kimi.errors import TargetError
from eagle3_kimi.target import Target

_TEXT_MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
"""Model types whose text model transformers knows under another name."""


class FirstLayers:
    """The embedding and the first `num_layers` layers of a target, in float32.

    Raises:
        TargetError: a tensor of these layers is quantised or missing; nothing can be recomputed then.
    """

    def __init__(self, target: Target, num_layers: int, *, device: torch.device | str = "cpu") -> None:
        from transformers import AutoConfig, AutoModel

        self._target, self._device = target, torch.device(device)
        values = {key: value for key, value in target.config.items() if key not in ("auto_map", "quantization_config")}
        model_type = values.pop("model_type")
        # the embedding stays on disk: only the rows asked for are read
        values.update(num_hidden_layers=num_layers, vocab_size=1, dtype="float32")
        values.update(bos_token_id=None, eos_token_id=None, pad_token_id=None)
        config = AutoConfig.for_model(_TEXT_MODEL_TYPES.get(model_type, model_type), **values)
        self._model = AutoModel.from_config(config).eval()
        state = {name: self._read(name) for name in self._model.state_dict() if name.startswith("layers.")}
        self._model.load_state_dict(state, strict=False)
        self._model.norm = nn.Identity()
        self._model.to(self._device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [S] -> float32 [S, H], on the CPU: the residual stream after the last of these layers."""
        embedded = embed(self._target, token_ids).to(self._device)
        return self._model(inputs_embeds=embedded[None], use_cache=False).last_hidden_state[0].float().cpu()

    def keep_part(self, projections: tuple[str, ...], processes: int) -> None:
        """Keeps what the first of `processes` tensor-parallel processes computes of layer 0 before the sum over them.

        They split the columns of the projections that end the attention and the MLP (`attention`, `mlp`); the part of
        the others is made zero.
        """
        names = {"attention": ("o_proj.weight",), "mlp": ("down_proj.weight", "down_proj")}
        endings = tuple(ending for projection in projections for ending in names[projection])
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                if name.startswith("layers.0.") and name.endswith(endings):
                    weight[..., weight.shape[-1] // processes :] = 0

    def _read(self, name: str) -> Tensor:
        """One tensor of transformers' model; it stacks the experts that checkpoints keep apart."""
        if name.endswith(".mlp.experts.gate_up_proj"):
            gate, up = self._read_experts(name, "gate_proj"), self._read_experts(name, "up_proj")
            return torch.cat([gate, up], dim=1)
        if name.endswith(".mlp.experts.down_proj"):
            return self._read_experts(name, "down_proj")
        tensor = self._target.read_named_tensor(f"model.{name}")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise TargetError(f"{self._target.name}: {name} is stored as {tensor.dtype}; it cannot be recomputed here")
        return tensor.float()

    def _read_experts(self, name: str, projection: str) -> Tensor:
        prefix = "model." + name.rsplit(".", 1)[0]
        count = int(self._target.config.get("n_routed_experts") or self._target.config["num_experts"])
        read: Any = self._target.read_named_tensor
        return torch.stack([read(f"{prefix}.{expert}.{projection}.weight").float() for expert in range(count)])


def embed(target: Target, token_ids: Tensor) -> Tensor:
    """int64 [S] -> float32 [S, H]: boundary 0, reading only the rows that occur."""
    rows, inverse = token_ids.unique(return_inverse=True)
    return target.read_tensor("embed_tokens", rows=rows).float()[inverse]
