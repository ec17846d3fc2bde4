"""Faults of a drafter's tensors: names no engine loads, parameters none fills, shapes, dtypes, values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.drafter.faults import Fault, FaultName
from eagle3_kimi.drafter.folder import DTYPES, TensorFacts
from eagle3_kimi.drafter.layouts import Trunk
from eagle3_kimi.drafter.loading import expected_shapes, optional_shapes, place_of, required_keys
from eagle3_kimi.drafter.vocab import find_vocab_map_faults

_UNKNOWN_NAME = {
    "vllm": "vLLM stops at names it does not know, and skips biases in silence",
    "sglang": "SGLang skips names it does not know in silence",
}


def find_tensor_faults(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorFacts],
    trunks: Mapping[str, Trunk],
    target: Mapping[str, Any],
) -> list[Fault]:
    """All faults that the headers of the files show.

    Args:
        config: flat.
        tensors: every tensor of the files.
        trunks: engine -> the class it builds.
        target: what is known of the target's text configuration.
    """
    if any(name.startswith("draft_model.") for name in tensors):
        sentence = "the tensors are named draft_model.*: a training checkpoint, to be exported first"
        return [Fault(FaultName.TRAINING_CHECKPOINT, sentence)]
    faults = []
    for engine, trunk in trunks.items():
        placed = {name: place_of(name, engine, trunk) for name in tensors}
        faults += _name_faults(config, placed, engine, trunk)
        faults += _missing_faults(config, set(placed.values()), engine, trunk, target)
        shapes = {place: fact.shape for fact, place in zip(tensors.values(), placed.values(), strict=True)}
        faults += _shape_faults(config, shapes, engine, trunk)
    return faults + _dtype_faults(config, tensors)


def find_value_faults(config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> list[Fault]:
    """All faults that only the values show; one tensor is in memory at a time."""
    faults = []
    maps: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.endswith(("d2t", "t2d")):
            maps[name[-3:]] = tensor
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            faults.append(Fault(FaultName.NOT_FINITE, f"{name} holds NaN or infinite values"))
    if "d2t" in maps:
        faults += find_vocab_map_faults(maps["d2t"], maps.get("t2d"), vocab_size=config["vocab_size"])
    return faults


def _name_faults(config: Mapping[str, Any], placed: Mapping[str, str | None], engine: str, trunk: Trunk) -> list[Fault]:
    known = {*expected_shapes(config, engine, trunk), *optional_shapes(config), "d2t", ""}
    unknown = [name for name, place in placed.items() if place not in known]
    norms = [name for name in unknown if "norm" in name and name.count(".") <= 2]
    faults = []
    if norms:
        sentence = f"{_shorten(norms)}: norms that {engine} has no place for with this config.json"
        faults.append(Fault(FaultName.EXTRA_NORMS, sentence))
    if len(unknown) > len(norms):
        sentence = f"{_shorten([name for name in unknown if name not in norms])}: {_UNKNOWN_NAME[engine]}"
        faults.append(Fault(FaultName.TENSOR_NAMES_UNKNOWN_TO_ENGINE, sentence))
    if engine == "vllm" and "d2t" in placed and "d2t" not in expected_shapes(config, engine, trunk):
        sentence = "d2t is there although the draft vocabulary is the target's: vLLM stops at it"
        faults.append(Fault(FaultName.D2T_WITHOUT_REDUCTION, sentence))
    return faults


def _missing_faults(
    config: Mapping[str, Any], found: Collection[str | None], engine: str, trunk: Trunk, target: Mapping[str, Any]
) -> list[Fault]:
    missing = [name for name in expected_shapes(config, engine, trunk) if name not in found]
    faults = []
    if "lm_head.weight" in missing:
        makes = "vLLM takes the target's head" if engine == "vllm" else "SGLang leaves it random"
        faults.append(Fault(FaultName.MISSING_LM_HEAD, f"lm_head.weight is missing: {makes}"))
    if "d2t" in missing:
        sentence = f"d2t is missing: {engine} takes draft ids for target ids in silence"
        faults.append(Fault(FaultName.MISSING_D2T, sentence))
    rest = [name for name in missing if name not in {"lm_head.weight", "d2t"}]
    if rest:
        faults.append(Fault(FaultName.MISSING_TENSORS, f"{_shorten(rest)}: {engine} finds none and leaves it random"))
    own, wanted = config.get("hidden_size"), target.get("hidden_size", config.get("target_hidden_size"))
    if "embed_tokens.weight" not in found and None not in (own, wanted) and own != wanted:
        sentence = f"embed_tokens.weight is missing, and the target's is {wanted} wide, not {own}: it cannot be shared"
        faults.append(Fault(FaultName.MISSING_EMBED_TOKENS, sentence))
    return faults


def _shape_faults(
    config: Mapping[str, Any], shapes: Mapping[str | None, tuple[int, ...] | None], engine: str, trunk: Trunk
) -> list[Fault]:
    lacking = [key for key in required_keys(trunk) if config.get(key) is None]
    if lacking and None not in shapes.values():
        sentence = f"config.json lacks {', '.join(lacking)}: engines take the defaults of transformers"
        return [Fault(FaultName.MISSING_CONFIG_KEYS, sentence)]
    wanted = {**expected_shapes(config, engine, trunk), **optional_shapes(config)}
    return [
        Fault(FaultName.SHAPE_DIFFERS, f"{name} is {list(came)}, by config.json it is {list(wanted[name])}")
        for name, came in shapes.items()
        if came is not None and name in wanted and 0 not in wanted[name] and came != wanted[name]
    ]


def _dtype_faults(config: Mapping[str, Any], tensors: Mapping[str, TensorFacts]) -> list[Fault]:
    declared = config.get("dtype") or config.get("torch_dtype")
    faults = []
    weights = {name: fact.dtype for name, fact in tensors.items() if fact.dtype and not name.endswith(("d2t", "t2d"))}
    exotic = [f"{name} ({dtype})" for name, dtype in weights.items() if dtype not in DTYPES]
    if exotic:
        sentence = f"{_shorten(exotic)}: drafters are served in {', '.join(DTYPES)}"
        faults.append(Fault(FaultName.QUANTISED, sentence))
    other = [name for name, dtype in weights.items() if dtype in DTYPES and dtype != declared]
    if other and declared is not None:
        sentence = f"{_shorten(other)} is {weights[other[0]]}, config.json declares {declared}"
        faults.append(Fault(FaultName.CAST_TO_DECLARED_DTYPE, sentence))
    return faults


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
