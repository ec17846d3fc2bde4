"""Faults of a drafter's configuration: sizes, positions, rope, norms. One rule, one function."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from eagle3_kimi.drafter.config import read_rope
from eagle3_kimi.drafter.faults import Fault, FaultName
from eagle3_kimi.drafter.layouts import NORM_FLAGS, Trunk
from eagle3_kimi.drafter.loading import norm_flag

_DEFAULT_POSITIONS = 2048  # of LlamaConfig, where the key is missing


def find_config_faults(
    config: Mapping[str, Any], engines: Collection[str], trunk: Trunk, target: Mapping[str, Any]
) -> list[Fault]:
    """All faults that need no tensor.

    Args:
        config: flat.
        engines: those that are to serve the drafter.
        trunk: of the drafter.
        target: what is known of the target's text configuration; empty if nothing is.
    """
    return [
        *_layer_faults(config, engines),
        *_vocab_faults(config, engines, target),
        *_hidden_size_faults(config, target),
        *_position_faults(config, target),
        *_rope_faults(config, trunk, target),
        *_norm_faults(config, engines, trunk),
        *_switch_faults(config, engines),
    ]


def _layer_faults(config: Mapping[str, Any], engines: Collection[str]) -> list[Fault]:
    count = config.get("num_hidden_layers", 1)
    if count == 1 or "sglang" not in engines:
        return []
    sentence = f"num_hidden_layers is {count}: SGLang names the later layers otherwise than vLLM, no file serves both"
    return [Fault(FaultName.MORE_THAN_ONE_LAYER, sentence)]


def _vocab_faults(config: Mapping[str, Any], engines: Collection[str], target: Mapping[str, Any]) -> list[Fault]:
    faults = []
    draft, vocab, wanted = config.get("draft_vocab_size"), config.get("vocab_size"), target.get("vocab_size")
    if draft is None and "sglang" in engines:
        sentence = "draft_vocab_size is missing: SGLang stops, or (null) takes the target's head"
        faults.append(Fault(FaultName.MISSING_DRAFT_VOCAB_SIZE, sentence))
    if None not in (vocab, wanted) and vocab != wanted:
        faults.append(Fault(FaultName.VOCAB_SIZE_DIFFERS, f"vocab_size is {vocab}, the target's is {wanted}"))
    if draft is not None and vocab is not None and not 0 < draft <= vocab:
        sentence = f"draft_vocab_size is {draft}, it must be within 1..{vocab} (vocab_size)"
        faults.append(Fault(FaultName.VOCAB_SIZE_DIFFERS, sentence))
    return faults


def _hidden_size_faults(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[Fault]:
    wanted, own, stated = target.get("hidden_size"), config.get("hidden_size"), config.get("target_hidden_size")
    if wanted is None or own is None or (stated or own) == wanted:
        return []
    if stated is None:
        sentence = f"hidden_size is {own}, the target's {wanted}, and target_hidden_size is not set: engines take {own}"
        return [Fault(FaultName.MISSING_TARGET_HIDDEN_SIZE, sentence)]
    sentence = f"target_hidden_size is {stated}, the target's hidden size is {wanted}"
    return [Fault(FaultName.TARGET_HIDDEN_SIZE_DIFFERS, sentence)]


def _position_faults(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[Fault]:
    came, wanted = config.get("max_position_embeddings", _DEFAULT_POSITIONS), target.get("max_position_embeddings")
    if wanted is None or came >= wanted:
        return []
    sentence = f"max_position_embeddings is {came}, the target's {wanted}: past it positions are not in the rope table"
    return [Fault(FaultName.DRAFT_CONTEXT_TOO_SHORT, sentence)]


def _rope_faults(config: Mapping[str, Any], trunk: Trunk, target: Mapping[str, Any]) -> list[Fault]:
    """Old readers know `rope_theta` and `rope_scaling`, new ones `rope_parameters`; the target's rope is the measure.

    An MLA target's YaRN may be left out by a Llama-style drafter, whose heads are others (see `DrafterConfig`).
    """
    faults = []
    old = {key: config[key] for key in ("rope_theta", "rope_scaling") if config.get(key)}
    new = config.get("rope_parameters")
    theta, scaling = read_rope(config)
    if new and old and _differ(read_rope(old), (theta, scaling), known=old):
        sentence = f"rope_parameters say {theta:g} {scaling or 'default'}, rope_theta and rope_scaling {old}"
        faults.append(Fault(FaultName.ROPE_SCHEMAS_DISAGREE, sentence))
    if _has_rope(target):
        target_theta, target_scaling = read_rope(target)
        may_be_plain = bool(target.get("kv_lora_rank")) and trunk != "mla"
        if theta != target_theta or not (scaling == target_scaling or (may_be_plain and scaling is None)):
            wanted = f"{target_theta:g} {target_scaling or 'default'}"
            sentence = f"rope is {theta:g} {scaling or 'default'}, the target's is {wanted}"
            faults.append(Fault(FaultName.ROPE_DIFFERS_FROM_TARGET, sentence))
    if new and ("rope_theta" not in old or (scaling and "rope_scaling" not in old)):
        sentence = "only rope_parameters hold the rope: readers of rope_theta and rope_scaling fall back to plain 10000"
        faults.append(Fault(FaultName.WRITE_BOTH_ROPE_SCHEMAS, sentence))
    return faults


def _differ(old: tuple[float, Any], new: tuple[float, Any], *, known: Mapping[str, Any]) -> bool:
    """Whether what the old keys say contradicts the new ones; what they leave out does not."""
    theta = "rope_theta" in known and old[0] != new[0]
    return theta or ("rope_scaling" in known and old[1] != new[1])


def _has_rope(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))


def _norm_faults(config: Mapping[str, Any], engines: Collection[str], trunk: Trunk) -> list[Fault]:
    """SGLang's MLA drafter knows `fc_norm` and `norm_output`, its Llama drafter no variant at all."""
    known = {"fc_norm", "norm_output"} if trunk == "mla" else set()
    flags = [flag for flag in NORM_FLAGS if norm_flag(config, flag) and flag not in known]
    if not flags or "sglang" not in engines:
        return []
    sentence = f"{', '.join(flags)} is on: SGLang computes the drafter without it"
    return [Fault(FaultName.EXTRA_NORMS, sentence)]


def _switch_faults(config: Mapping[str, Any], engines: Collection[str]) -> list[Fault]:
    faults = []
    if config.get("tie_word_embeddings") and "sglang" in engines:
        sentence = "tie_word_embeddings is true: SGLang takes the embedding for the head"
        faults.append(Fault(FaultName.TIED_EMBEDDINGS, sentence))
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        sentence = "eagle_config.use_aux_hidden_state is false: vLLM drops fc and feeds one hidden state"
        faults.append(Fault(FaultName.NO_AUX_HIDDEN_STATES, sentence))
    if config.get("attention_bias") or config.get("mlp_bias"):
        sentence = "attention_bias or mlp_bias is on: SGLang has no place for biases, and vLLM's are not checked here"
        faults.append(Fault(FaultName.BIASES, sentence))
    if config.get("quantization_config"):
        sentence = "quantization_config: the weights are quantised, so their shapes and dtypes cannot be judged here"
        faults.append(Fault(FaultName.QUANTISED, sentence))
    return faults
