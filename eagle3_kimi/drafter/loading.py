"""The loading rules of vLLM and SGLang, replayed on names and shapes.

Both look every tensor of the file up in their own module. vLLM (`llama_eagle3.py`, `qwen3_eagle3.py`,
`deepseek_eagle3.py`) stops at a name it does not know, but not at a parameter that no tensor filled, and it skips
biases; SGLang (`llama_eagle3.py`, `kimi_k25_eagle3.py`) skips unknown names in silence. What is not filled stays as it
was allocated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle3_kimi.drafter.layer_ids import KEY
from eagle3_kimi.drafter.layouts import ARCHITECTURES, Layout, Trunk, canonical_name

ENGINES = ("vllm", "sglang")

_SGLANG_ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"}
_TAKEN_FOR_MTP = {"deepseek_v3", "deepseek_v32", "glm_moe_dsa"}  # model types, whatever the architecture says
_UNUSED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def find_trunk(layout: Layout, engine: str) -> Trunk | None:
    """The class that the engine would build, None if it is none of its EAGLE-3 classes.

    vLLM puts `Eagle3` before an architecture that does not say it already, and takes some model types for a target's
    own MTP layer; SGLang takes the name as it is.
    """
    architecture = (layout.config.get("architectures") or [""])[0]
    if engine == "sglang":
        return ARCHITECTURES[architecture] if architecture in _SGLANG_ARCHITECTURES else None
    if layout.config.get("model_type") in _TAKEN_FOR_MTP:
        return None
    if not architecture.startswith("Eagle3") and not architecture.endswith("Eagle3"):
        architecture = f"Eagle3{architecture}"
    return ARCHITECTURES.get(architecture)


def place_of(name: str, engine: str, trunk: Trunk) -> str | None:
    """Our name of the parameter that the engine fills from the tensor `name`.

    None: it does not know the name. Empty: it drops the tensor, which is computed elsewhere.
    """
    if any(unused in name for unused in _UNUSED):
        return ""
    if engine == "sglang" and trunk == "llama":
        if name.endswith(("d2t", "t2d")):
            return name[-3:]
        known = name if "lm_head" in name else name.removeprefix("model.")
    else:
        known = re.sub(r"^layers\.0\.", "midlayer.", name)
    return known if known == canonical_name(known) else None


def expected_shapes(config: Mapping[str, Any], engine: str, trunk: Trunk) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of each parameter that the engine allocates and no other place fills.

    Sizes that the configuration lacks count as 0; see `required_keys`.
    """
    size = config.get("hidden_size", 0)
    target_size, num_aux = config.get("target_hidden_size") or size, count_aux_states(config, engine, trunk)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, num_aux * target_size),
        **{f"midlayer.{name}": shape for name, shape in _layer_shapes(config, trunk, input_size=2 * size).items()},
        "midlayer.hidden_norm.weight": (size,),
    }
    for layer in range(1, config.get("num_hidden_layers", 1)):
        later = _layer_shapes(config, trunk, input_size=size)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in later.items()}
    vocab_size = config.get("vocab_size", 0)
    draft_vocab_size = config.get("draft_vocab_size") or vocab_size
    shapes |= {"norm.weight": (size,), "lm_head.weight": (draft_vocab_size, size)}
    if draft_vocab_size != vocab_size:
        shapes["d2t"] = (draft_vocab_size,)
    if config.get("fc_norm") and (engine == "vllm" or trunk == "mla"):
        shapes |= {f"fc_norm.{index}.weight": (target_size,) for index in range(num_aux)}
    if engine == "vllm" and trunk != "mla" and norm_flag(config, "norm_before_fc"):
        shapes["input_norm.weight"] = (num_aux * target_size,)
    return shapes


def optional_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors that a file may hold besides: the embedding (else the target's is shared) and the unread mask."""
    vocab_size = config.get("vocab_size", 0)
    return {"embed_tokens.weight": (vocab_size, config.get("hidden_size", 0)), "t2d": (vocab_size,)}


def required_keys(trunk: Trunk) -> tuple[str, ...]:
    """Keys whose absence would make engines take the defaults of `transformers`."""
    mla = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    keys = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    return (*keys, "rms_norm_eps", "vocab_size", *(mla if trunk == "mla" else ()))


def count_aux_states(config: Mapping[str, Any], engine: str, trunk: Trunk) -> int:
    """How many aux hidden states the engine's `fc` takes: not always as many as it captures."""
    nested = (config.get("eagle_config") or {}).get(KEY)
    if engine == "sglang":
        return 3 if trunk == "llama" else len(nested or config.get(KEY) or [0, 0, 0])
    ids = (config.get(KEY) or nested) if trunk == "qwen3" else nested
    stated = config.get("num_aux_layers") if trunk == "qwen3" else None
    return int(stated or config.get("num_aux_hidden_states") or len(ids or [0, 0, 0]))


def norm_flag(config: Mapping[str, Any], flag: str) -> bool:
    """A norm variant's flag; `norm_before_fc` may stand in `eagle_config`, which then wins."""
    nested = config.get("eagle_config") or {}
    if flag == "norm_before_fc" and flag in nested:
        return bool(nested[flag])
    return bool(config.get(flag))


def _layer_shapes(config: Mapping[str, Any], trunk: Trunk, *, input_size: int) -> dict[str, tuple[int, ...]]:
    size, inner = config.get("hidden_size", 0), config.get("intermediate_size", 0)
    heads = config.get("num_attention_heads") or 1
    attention: dict[str, tuple[int, ...]]
    if trunk == "mla":
        rope, value = config.get("qk_rope_head_dim", 0), config.get("v_head_dim", 0)
        nope, rank, query_rank = (config.get(key) or 0 for key in ("qk_nope_head_dim", "kv_lora_rank", "q_lora_rank"))
        attention = {
            "q_a_proj": (query_rank, input_size),
            "q_a_layernorm": (query_rank,),
            "q_b_proj": (heads * (nope + rope), query_rank),
            "kv_a_proj_with_mqa": (rank + rope, input_size),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (nope + value), rank),
            "o_proj": (size, heads * value),
        }
    else:
        head_dim = config.get("head_dim") or size // heads
        kv_width = (config.get("num_key_value_heads") or heads) * head_dim
        attention = {
            "q_proj": (heads * head_dim, input_size),
            "k_proj": (kv_width, input_size),
            "v_proj": (kv_width, input_size),
            "o_proj": (size, heads * head_dim),
        }
        if trunk == "qwen3":
            attention |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    return {
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        **{f"self_attn.{name}.weight": shape for name, shape in attention.items()},
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
