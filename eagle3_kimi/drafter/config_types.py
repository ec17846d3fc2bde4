"""Whether the values of a `config.json` are of the types that everything after this reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eagle3_kimi.drafter.faults import Fault, FaultName
from eagle3_kimi.drafter.layer_ids import KEY


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rope(value: Any) -> bool:
    return isinstance(value, dict) and _is_number(value.get("rope_theta", 1.0))


_INTEGERS = (
    "hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "max_position_embeddings", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_aux_hidden_states", "num_aux_layers",
)  # fmt: skip
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_INTEGERS, (_is_integer, "an integer")),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), (_is_number, "a number")),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (_is_rope, "an object whose rope_theta is a number")),
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), (lambda value: isinstance(value, str), "a string")),
    "architectures": (lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value), "names"),
    "eagle_config": (lambda value: isinstance(value, dict), "an object"),
    KEY: (lambda value: isinstance(value, list) and all(map(_is_integer, value)), "a list of integers"),
}


def find_type_faults(config: Mapping[str, Any]) -> list[Fault]:
    """Values of another type than engines read, in the configuration and the two places nested in it."""
    parts = [("", config), *((name, config.get(name)) for name in ("eagle_config", "transformer_layer_config"))]
    return [
        Fault(FaultName.MALFORMED_CONFIG, f"{f'{part}.' if part else ''}{key} is {values[key]!r}, expected {what}")
        for part, values in parts
        if isinstance(values, Mapping)
        for key, (is_right, what) in _TYPES.items()
        if values.get(key) is not None and not is_right(values[key])
    ]
