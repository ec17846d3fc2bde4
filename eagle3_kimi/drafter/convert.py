"""Other people's drafters, written as one directory that both engines load, or refused.

A conversion renames tensors, casts them to the declared dtype, and writes what a directory says once in every place
where an engine looks for it. Nothing is computed from weights. Whether that was enough, the export check decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.drafter.config import read_rope, write_rope
from eagle3_kimi.drafter.config_check import find_config_faults
from eagle3_kimi.drafter.config_types import find_type_faults
from eagle3_kimi.drafter.export import Format, write_folder
from eagle3_kimi.drafter.faults import FaultName
from eagle3_kimi.drafter.folder import DTYPES, DrafterFolder
from eagle3_kimi.drafter.layer_ids import KEY, stated_ids, write_layer_ids
from eagle3_kimi.drafter.layouts import Layout, Trunk, canonical_name, find_speculators_faults, read_layout
from eagle3_kimi.drafter.loading import find_trunk
from eagle3_kimi.drafter.vocab import find_vocab_map_faults
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.target import Target

_ARCHITECTURES: dict[Trunk, str] = {
    "llama": "LlamaForCausalLMEagle3",
    "qwen3": "Eagle3Qwen3ForCausalLM",
    "mla": "Eagle3DeepseekV2ForCausalLM",
}
_CONTRADICTIONS = {FaultName.ROPE_SCHEMAS_DISAGREE}  # which of the two is meant, nobody knows
_ONLY_FOR_TRAINING = {"verifier_norm.weight", "verifier_lm_head.weight"}  # the target's own, kept by speculators


@dataclass(frozen=True)
class Conversion:
    """What was read and what was changed."""

    layout: str
    changes: tuple[str, ...]


def convert_drafter(
    path: Path,
    out_dir: Path,
    *,
    target: Target | None = None,
    format: Format = "eagle3",
    aux_layer_ids: Sequence[int] | None = None,
) -> Conversion:
    """Writes the drafter in `path` to `out_dir`, for vLLM and SGLang (`eagle3`) or vLLM (`speculators`).

    Args:
        path: a drafter directory in any of the published layouts.
        out_dir: replaced if it exists.
        target: the target it was trained for; sizes, rope and layer ids are checked against it.
        format: the layout to write.
        aux_layer_ids: boundary ids it was trained on, where the directory does not tell.

    Raises:
        DataError: the result would not serve, so the conversion is not lossless; `out_dir` is as it was.
        UsageError: the two folders are one.
    """
    if path.resolve() == out_dir.resolve():
        raise UsageError(f"{path} would be replaced by its own conversion; give another output folder")
    folder = DrafterFolder(path)
    layout = read_layout(folder.config, folder.tensors)
    wrong = find_type_faults(folder.config)
    if not wrong and layout.is_speculators:
        wrong = find_speculators_faults(folder.config)
    trunk = None if wrong else find_trunk(layout, "vllm") or find_trunk(layout, "sglang")
    if trunk is not None:
        wrong = [fault for fault in find_config_faults(layout.config, (), trunk, {}) if fault.name in _CONTRADICTIONS]
    if trunk is None or wrong:
        why = "; ".join(map(str, wrong)) or f"no engine serves architectures {layout.config.get('architectures')}"
        raise DataError(f"the drafter in {path} ({layout.name}) cannot be converted: {why}")
    tensors, changes = _convert_tensors(folder, layout, trunk)
    num_layers = None if target is None else target.num_layers
    ids = aux_layer_ids or _read_layer_ids(layout, num_layers)
    if not ids:
        raise DataError(
            f"{path} says nothing, or two things, of the layers it was trained on: give their boundary ids with "
            "--aux-layer-ids"
        )
    config = _convert_config(layout, trunk, tensors, ids)
    changes += [f"config.json: {key} is {value}" for key, value in config.items() if layout.config.get(key) != value]
    try:
        write_folder(config, tensors, out_dir, format=format, target=target)
    except DataError as error:
        raise DataError(f"the drafter in {path} ({layout.name}) cannot be converted without loss: {error}") from error
    return Conversion(layout=layout.name, changes=tuple(changes))


def _read_layer_ids(layout: Layout, num_layers: int | None) -> list[int] | None:
    """None where nothing or two things are said."""
    top, nested = layout.config.get(KEY), (layout.config.get("eagle_config") or {}).get(KEY)
    if top and nested and [layer + 1 for layer in nested] != top:
        return None
    return stated_ids(layout, num_layers)


def _convert_config(layout: Layout, trunk: Trunk, tensors: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, Any]:
    """The flat configuration with each fact under every key that an engine reads."""
    config = {"tie_word_embeddings": False, **layout.config}
    if "lm_head.weight" in tensors:
        config.setdefault("draft_vocab_size", len(tensors["lm_head.weight"]))
    if trunk != "mla" and "hidden_size" in config and "num_attention_heads" in config:
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if "fc.weight" in tensors:
        config.setdefault("target_hidden_size", tensors["fc.weight"].shape[1] // len(ids))
    dtype = _declared_dtype(config, tensors)
    if dtype is None:
        raise DataError("the tensors have several dtypes and config.json declares none: which one is meant is unknown")
    layer_ids, nested = write_layer_ids(ids), config.get("eagle_config") or {}
    return {
        **config,
        "architectures": [_ARCHITECTURES[trunk]],
        "model_type": "kimi_k2" if trunk == "mla" else config.get("model_type"),  # deepseek_v3 is MTP to vLLM
        **write_rope(*read_rope(config)),
        "torch_dtype": dtype,
        "dtype": dtype,
        **layer_ids,
        "eagle_config": {**layer_ids["eagle_config"], **nested, KEY: layer_ids["eagle_config"][KEY]},
    }


def _convert_tensors(folder: DrafterFolder, layout: Layout, trunk: Trunk) -> tuple[dict[str, Tensor], list[str]]:
    tensors, changes = {}, []
    for name, tensor in folder.read():
        known = canonical_name(name)
        if known in _ONLY_FOR_TRAINING or "rotary_emb." in known:
            changes.append(f"{name}: left out, engines compute it or have it")
            continue
        written = known.replace("midlayer.", "layers.0.") if trunk == "mla" else known
        if written in tensors:
            raise DataError(f"{folder.path} holds two tensors for {written}")
        tensors[written] = tensor
        if written != name:
            changes.append(f"{name}: now {written}")
    dtype = DTYPES.get(_declared_dtype(layout.config, tensors) or "")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and dtype is not None and tensor.dtype != dtype:
            tensors[name] = tensor.to(dtype)
            changes.append(f"{name}: {tensor.dtype} cast to {dtype}")
    changes += _mend_vocab_map(tensors, layout.config.get("vocab_size", 0))
    return tensors, changes


def _mend_vocab_map(tensors: dict[str, Tensor], vocab_size: int) -> list[str]:
    """Ids become offsets, the mask is written, and the map of a full vocabulary onto itself goes."""
    d2t = tensors.get("d2t")
    if d2t is None:
        return []
    changes = []
    indices = torch.arange(len(d2t))
    names = [fault.name for fault in find_vocab_map_faults(d2t, tensors.get("t2d"), vocab_size=vocab_size)]
    if names == [FaultName.D2T_HOLDS_IDS]:
        d2t = d2t.long() - indices
        changes.append("d2t: target ids, now offsets")
    elif names:
        return []  # left to the check
    if len(d2t) == vocab_size and not d2t.any():
        del tensors["d2t"]
        tensors.pop("t2d", None)
        return [*changes, "d2t, t2d: left out, the draft vocabulary is the target's"]
    if "t2d" not in tensors:
        changes.append("t2d: written from d2t")
    tensors["d2t"] = d2t.long()
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tensors["d2t"] + indices, True)
    return changes


def _declared_dtype(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
    declared = config.get("dtype") or config.get("torch_dtype")
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    return declared or (kinds.pop() if len(kinds) == 1 else None)
