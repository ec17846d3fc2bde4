"""The published drafter layouts, read into one: a flat configuration and our names for the tensors.

    who writes it                        tensors            aux layer ids
    this package                         midlayer.*         boundary on top, output in eagle_config
    SpecForge, NeMo / Model Optimizer    midlayer.* or      output, in eagle_config alone
                                         layers.0.*
    TorchSpec                            midlayer.*, or     output, in eagle_config alone; boundary for an MLA drafter
                                         layers.0.* for     of model type kimi_k2 that is exported for vLLM
                                         vLLM
    speculators                          layers.0.*         boundary, on top; the sizes under transformer_layer_config
    MLA drafters (DeepSeek-style)        layers.0.*         as their trainer writes them

Boundary numbering: id j is the residual stream entering decoder layer j. By output: id j is what layer j puts out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eagle3_kimi.drafter.faults import Fault, FaultName

Trunk = Literal["llama", "qwen3", "mla"]

ARCHITECTURES: dict[str, Trunk] = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
"""Architecture -> shape of its decoder layer; the ones that either engine serves as EAGLE-3."""

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of the drafter that vLLM knows and SGLang's Llama drafter does not."""

_PREFIX = re.compile(r"^(?:draft_model|eagle_module|module|model)\.")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A drafter's configuration as vLLM reads it, and who wrote it that way."""

    name: str
    config: Mapping[str, Any]
    """Flat: what the speculators layout nests is lifted to the top."""
    is_speculators: bool
    nested_by_output: bool = True
    """Whether layer ids that stand in `eagle_config` alone are numbered by output."""


def read_layout(config: Mapping[str, Any], names: Iterable[str] = ()) -> Layout:
    """Recognises the layout of a `config.json` and the tensor names beside it. A null is as good as no key."""
    config = {key: value for key, value in config.items() if value is not None}
    if "speculators_model_type" in config:
        return Layout(name="speculators", config=_flatten_speculators(config), is_speculators=True)
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if "_torchspec_version" in config:  # its exports for vLLM are renumbered for this model type alone
        for_vllm = config.get("model_type") == "kimi_k2" and any(name.startswith("layers.0.") for name in names)
        return Layout(name="TorchSpec", config=config, is_speculators=False, nested_by_output=not for_vllm)
    if any(key in nested for key in ("use_input_layernorm_in_first_layer", "use_last_layernorm")):
        name = "NeMo / Model Optimizer"
    elif config.get("eagle_aux_hidden_state_layer_ids") and nested:
        name = "eagle3-kimi"
    else:
        name = "SpecForge" if any("midlayer." in tensor for tensor in names) else "unknown"
    return Layout(name=name, config=config, is_speculators=False)


def find_speculators_faults(config: Mapping[str, Any], *, has_weights: bool = True) -> list[Fault]:
    """What vLLM's reader of the speculators layout stops at, or computes otherwise than the weights were trained."""
    sentences = []
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        sentences.append(f"speculators_model_type is {kind!r}, expected 'eagle3'")
    if not isinstance(config.get("transformer_layer_config"), dict):
        sentences.append("transformer_layer_config, which holds the sizes, is missing")
    given = config.get("speculators_config")
    given = given if isinstance(given, dict) else {}
    methods = given.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, dict) or not first.get("speculative_tokens"):
        sentences.append("speculators_config.proposal_methods[0].speculative_tokens is missing")
    verifier = given.get("verifier")
    if not isinstance(verifier, dict) or not verifier.get("name_or_path"):
        sentences.append("speculators_config.verifier.name_or_path, the target's name, is missing")
    faults = [Fault(FaultName.INVALID_SPECULATORS_CONFIG, f"{sentence}: vLLM stops") for sentence in sentences]
    if has_weights and not faults and config.get("norm_before_residual") is None:
        sentence = "norm_before_residual is not written: vLLM takes it for true, the trainer's own default is false"
        faults.append(Fault(FaultName.EXTRA_NORMS, sentence))
    return faults


def canonical_name(name: str) -> str:
    """Our name of a tensor, whichever layout it came from (it may still be one that no engine knows)."""
    return re.sub(r"^layers\.0\.", "midlayer.", _PREFIX.sub("", name))


def _flatten_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's `SpeculatorsConfig` makes of it."""
    inner = config.get("transformer_layer_config")
    flat = {key: value for key, value in inner.items() if value is not None} if isinstance(inner, dict) else {}
    kind = str(flat.setdefault("model_type", "llama"))
    known = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
    flat["architectures"] = [known.get(kind, kind)]
    flat["norm_before_residual"] = config.get("norm_before_residual", True)
    keys = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *NORM_FLAGS[1:])
    flat |= {key: config[key] for key in keys if config.get(key) is not None}
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None:
            flat.setdefault(key, config[key])
    return flat
