"""Checks one case of kind `export`: parts of a drafter directory -> the faults that serving it would have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagle3_kimi.drafter.export_check import find_faults
from eagle3_kimi.drafter.faults import Fault, FaultName, verdict_of
from eagle3_kimi.drafter.folder import TensorFacts
from eagle3_kimi.drafter.layer_ids import KEY, find_layer_id_faults, number_for_engine, write_layer_ids
from eagle3_kimi.drafter.loading import ENGINES
from eagle3_kimi.drafter.vocab import find_vocab_map_faults
from eagle3_kimi.errors import DataError

_TARGET_KEYS = {
    "hidden_size": ("target_hidden_size",),
    "vocab_size": ("target_vocab_size",),
    "num_hidden_layers": ("target_num_layers", "target_num_hidden_layers", "target_layers", "num_layers"),
    "max_position_embeddings": ("target_max_position", "target_max_position_embeddings", "target_context"),
    "rope_theta": ("target_rope_theta",),
    "rope_scaling": ("target_rope_scaling", "target_rope"),
    "rope_parameters": ("target_rope_parameters",),
}
"""What a case may call a key of the target's configuration."""

_LAYER = (
    "hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def check(case: dict[str, Any]) -> str | None:
    """None when the case passes, else one line that says what differs."""
    given, expect = case["input"], case["expect"]
    try:
        faults, came = _judge(given, case.get("context") or {})
    except DataError as error:
        faults, came = [], {"verdict": "reject", "refusal": str(error)}
    came.setdefault("verdict", verdict_of(faults))
    names = [str(fault.name) for fault in faults]
    for key in ("verdict", "ids"):
        if key in came and expect.get(key) is not None and came[key] != expect[key]:
            why = f"{expect.get('reason')}"
            return f"{key}: expected {expect[key]} ({why}), came {came[key]} ({', '.join(map(str, faults))})"
    if expect.get("reason") in list(FaultName) and "refusal" not in came and expect["reason"] not in names:
        return f"reason: expected {expect['reason']}, came {names}"
    return None


def _judge(given: Mapping[str, Any], context: Mapping[str, Any]) -> tuple[list[Fault], dict[str, Any]]:
    engine = given.get("engine", context.get("engine"))
    engines = ENGINES if engine is None else (engine,)
    target = _read_target({**context, **given})
    trained = given.get("trained_boundary_ids")
    came: dict[str, Any] = {}
    faults: list[Fault] = []
    if trained and engine is not None:
        came["ids"] = number_for_engine(trained, engine)
    if trained and "config" not in given:
        config = write_layer_ids(trained)
        for key in given.keys() & {"ids", "exported_ids", "written_ids", "config_ids", "export_ids"}:
            config = {KEY: given[key], "eagle_config": {KEY: given[key]}}  # what an export holds for that engine
        faults += find_layer_id_faults(config, engines, num_layers=target.get("num_hidden_layers"), trained=trained)
    if "config" in given:
        tensors = _read_tensors(given)
        faults += find_faults(given["config"], tensors, target=target, engines=engines, trained_layer_ids=trained)
    if "d2t" in given:
        mask = given.get("t2d")
        config = given.get("config") or {}
        size = target.get("vocab_size") or config.get("vocab_size") or given.get("vocab_size") or len(mask or ())
        t2d = None if mask is None else torch.tensor(mask).bool()
        ids = torch.tensor(given["d2t"]) + torch.arange(len(given["d2t"]))
        faults += find_vocab_map_faults(torch.tensor(given["d2t"]), t2d, vocab_size=size or int(ids.max()) + 1)
    return faults, came


def _read_target(given: Mapping[str, Any]) -> dict[str, Any]:
    named = next((given[key] for key in ("target_config", "target") if isinstance(given.get(key), Mapping)), {})
    config = dict(named.get("text_config") or named)
    for key, names in _TARGET_KEYS.items():
        value = next((given[name] for name in names if given.get(name) is not None), None)
        if value is not None:
            config[key] = value
    return config


def _read_tensors(given: Mapping[str, Any]) -> dict[str, TensorFacts] | None:
    """A case lists a few tensors: one of a layer stands for the layer. A dtype alone says nothing of the names."""
    tensors, dtype = given.get("tensors"), given.get("tensor_dtype")
    if tensors is None and dtype is None:
        return None
    if tensors is None:
        config = given.get("config") or {}
        reduced = config.get("draft_vocab_size") != config.get("vocab_size")
        tensors = ["fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight"]
        tensors += ["d2t", "t2d"] if reduced else []
    names = list(tensors)
    for prefix in ("midlayer.", "layers.0."):
        if any(name.startswith(prefix) for name in names):
            names += [f"{prefix}{name}.weight" for name in _LAYER]
    return {name: TensorFacts(_shape(tensors, name), dtype) for name in dict.fromkeys(names)}


def _shape(tensors: Any, name: str) -> tuple[int, ...] | None:
    value = tensors.get(name) if isinstance(tensors, Mapping) else None
    value = value.get("shape") if isinstance(value, Mapping) else value
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
