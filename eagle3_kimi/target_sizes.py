"""What a target weighs, from its config alone: bytes of weights, bytes of cache, multiplications a token.

Kimi-K2.5: 1,015 G parameters in routed experts at 4.5 bits (4, and a bf16 scale for every 32) and 11.7 G in bf16
beside them make 594 GB; 31.7 G of them multiply with every token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import UsageError

_SHIPPED = {"moonshotai/Kimi-K2.5": "kimi_k25.json", "tiny": "tiny.json"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MODULES = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "attention": "model.layers.0.self_attn.o_proj",
    "dense": "model.layers.0.mlp.up_proj",
    "shared_experts": "model.layers.1.mlp.shared_experts.up_proj",
    "routed_experts": "model.layers.1.mlp.experts.0.up_proj",
    "router": "model.layers.1.mlp.gate",
}
"""One module of each part, to ask a quantisation's list of exceptions about."""


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """A target's sizes."""

    name: str
    config: Mapping[str, Any]
    """Of the text model."""

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def state_bytes(self) -> int:
        """Of one value of a hidden state, as the target computes it."""
        return _BYTES[str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")]

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 in a dense target."""
        return int(self.config.get("n_routed_experts") or 0)

    @property
    def experts_per_token(self) -> int:
        return int(self.config.get("num_experts_per_tok") or 0)

    @property
    def is_mla(self) -> bool:
        return bool(self.config.get("kv_lora_rank"))

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Of each part, norms and biases left out."""
        get, hidden = self.config.__getitem__, self.hidden_size
        embedding = self.vocab_size * hidden
        parts = {
            "embedding": embedding,
            "head": 0 if self.config.get("tie_word_embeddings") else embedding,
            "attention": self.num_layers * self._attention_parameters(),
        }
        if not self.num_experts:
            return {**parts, "dense": self.num_layers * 3 * hidden * get("intermediate_size")}
        sparse = self.num_layers - int(self.config.get("first_k_dense_replace") or 0)
        expert = 3 * hidden * get("moe_intermediate_size")
        return {
            **parts,
            "dense": (self.num_layers - sparse) * 3 * hidden * get("intermediate_size"),
            "shared_experts": sparse * int(self.config.get("n_shared_experts") or 0) * expert,
            "routed_experts": sparse * self.num_experts * expert,
            "router": sparse * self.num_experts * hidden,
        }

    def _attention_parameters(self) -> int:
        get, hidden, heads = self.config.__getitem__, self.hidden_size, int(self.config["num_attention_heads"])
        if not self.is_mla:
            size = int(self.config.get("head_dim") or hidden // heads)
            return 2 * hidden * size * (heads + int(get("num_key_value_heads")))
        key, rope, value = get("qk_nope_head_dim"), get("qk_rope_head_dim"), get("v_head_dim")
        rank = get("kv_lora_rank")
        query_rank = self.config.get("q_lora_rank")
        query_width = heads * (key + rope)
        query = query_rank * (hidden + query_width) if query_rank else hidden * query_width
        return int(query + hidden * (rank + rope) + rank * heads * (key + value) + heads * value * hidden)

    @cached_property
    def weight_bytes(self) -> dict[str, float]:
        """Of each part, as stored and as loaded."""
        return {part: count * self._bytes_per_parameter(part) for part, count in self.parameters.items()}

    @property
    def active_parameters(self) -> int:
        """That multiply with one token; a tied embedding counts as the head it is."""
        parts = dict(self.parameters)
        parts["head"] = parts.pop("embedding")
        if self.num_experts:
            parts["routed_experts"] = parts["routed_experts"] * self.experts_per_token // self.num_experts
        return sum(parts.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """In the cache of one GPU, all layers, where a single GPU holds the target."""
        if self.is_mla:
            latent = int(self.config["kv_lora_rank"] + self.config["qk_rope_head_dim"])
            return self.num_layers * self.state_bytes * latent
        size = self.config.get("head_dim") or self.hidden_size // self.config["num_attention_heads"]
        return int(self.num_layers * self.state_bytes * 2 * self.config["num_key_value_heads"] * size)

    def kv_bytes_per_gpu(self, tensor_parallel_size: int) -> float:
        """Bytes a token in each GPU's cache: MLA keeps all of it everywhere, other targets share their heads."""
        if self.is_mla:
            return self.kv_bytes_per_token
        return self.kv_bytes_per_token / min(tensor_parallel_size, int(self.config["num_key_value_heads"]))

    def _bytes_per_parameter(self, part: str) -> float:
        quantised = self.config.get("quantization_config")
        if not quantised or part in {"embedding", "router"}:
            return self.state_bytes
        method = quantised.get("quant_method")
        if method == "fp8":
            return 1 if part != "head" else self.state_bytes
        if method != "compressed-tensors":
            raise UsageError(f"{self.name}: quantisation is understood as compressed-tensors or fp8, came {method}")
        if any(_names(pattern, _MODULES[part]) for pattern in quantised["ignore"]):
            return self.state_bytes
        weights = quantised["config_groups"]["group_0"]["weights"]
        scale = self.state_bytes / weights["group_size"] if weights.get("group_size") else 0.0
        return float(weights["num_bits"] / 8 + scale)


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


def read_target_sizes(name: str) -> TargetSizes:
    """Sizes of `moonshotai/Kimi-K2.5` and `tiny` as shipped; else of a folder, or of a Hub name in the local cache.

    Raises:
        UsageError: no config.json of that name is here, or it lacks what is read.
    """
    folder = Path(name)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise UsageError(f"{folder} has no config.json; --target wants a model folder, a Hub name or `tiny`")
        text = file.read_text(encoding="utf-8")
    elif name in _SHIPPED:
        text = (files("eagle3_kimi") / "target_configs" / _SHIPPED[name]).read_text(encoding="utf-8")
    else:
        text = _read_cached_config(name)
    config = json.loads(text)
    sizes = TargetSizes(name=name, config=config.get("text_config") or config)
    try:
        _ = sizes.weight_bytes, sizes.kv_bytes_per_token, sizes.active_parameters
    except KeyError as error:
        raise UsageError(f"the config of {name} has no {error}, so its size is not known") from error
    return sizes


def _read_cached_config(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise UsageError(
            f"the config of {name} is neither shipped ({', '.join(_SHIPPED)}), nor in a folder, nor in the local Hub "
            f"cache; fetch it with `hf download {name} config.json`"
        )
    return Path(found).read_text(encoding="utf-8")
