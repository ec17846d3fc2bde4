"""The directory that vLLM and SGLang load, and the check that both will find in it what they look for.

Engines skip unknown names, leave missing tensors random and read different keys for the same thing, all in silence.
So both layer numberings and both rope schemas are written, and what was written is checked.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_kimi.drafter.config import DrafterConfig, from_output_ids, read_rope, to_output_ids
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.vocab import check_vocab_map
from eagle3_kimi.errors import DataError
from eagle3_kimi.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_drafter(model: DraftModel, out_dir: Path, *, target: Target, dtype: str | None = None) -> None:
    """Writes `config.json` and `model.safetensors`, checked, whole or not at all. See `write_drafter`."""
    write_drafter(model.config, model.state_dict(), out_dir, target=target, dtype=dtype)


def write_drafter(
    config: DrafterConfig, tensors: Mapping[str, Tensor], out_dir: Path, *, target: Target, dtype: str | None = None
) -> None:
    """Writes a drafter from its tensors (`DraftModel.state_dict()`).

    Args:
        config: the drafter's.
        tensors: under the exported names.
        out_dir: replaced if it exists.
        target: the target it was trained for.
        dtype: `float32`, `bfloat16` or `float16`; the target's own by default.

    Raises:
        DataError: what was written would not serve; `out_dir` is as it was.
    """
    dtype = dtype or str(target.config.get("dtype") or target.config.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise DataError(f"a drafter is exported as one of {', '.join(_DTYPES)}, not {dtype}")
    out_dir = Path(out_dir)
    temporary = out_dir.with_name(f".{out_dir.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    cast = {
        name: (tensor.to(_DTYPES[dtype]) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    save_file(cast, temporary / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(build_export_config(config, dtype), indent=2)
    (temporary / "config.json").write_text(text + "\n", encoding="utf-8")
    check_export(temporary, target)
    shutil.rmtree(out_dir, ignore_errors=True)
    os.replace(temporary, out_dir)


def build_export_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """`config.json`: each key that vLLM or SGLang reads."""
    scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
    aux_ids = list(config.aux_layer_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {**scaling, "type": scaling["rope_type"]},
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": aux_ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": to_output_ids(aux_ids),
            "use_aux_hidden_state": True,
        },
    }


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a drafter of this `config.json` has."""
    size, draft, inner = config["hidden_size"], config["draft_vocab_size"], config["intermediate_size"]
    width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(config["eagle_aux_hidden_state_layer_ids"]) * config["target_hidden_size"]),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (width, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv_width, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv_width, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, width),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "norm.weight": (size,),
        "lm_head.weight": (draft, size),
    }
    if draft < config["vocab_size"]:
        shapes |= {"d2t": (draft,), "t2d": (config["vocab_size"],)}
    return shapes


def check_export(path: Path, target: Target) -> None:
    """Refuses a drafter directory that an engine would load wrongly without a word.

    Raises:
        DataError: with every fault found.
    """
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    faults = _config_faults(config, target.config)
    if not faults:
        with safe_open(path / "model.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        faults = _tensor_faults(config, tensors)
    if faults:
        raise DataError(f"the drafter in {path} would not serve {target.name}: " + "; ".join(faults))


def _config_faults(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[str]:
    missing = [
        key for key in ("draft_vocab_size", "target_hidden_size", "head_dim", "eagle_config") if key not in config
    ]
    if missing:
        return [f"config.json lacks {', '.join(missing)}"]
    wanted = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "target_hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "tie_word_embeddings": False,
    }
    faults = [
        f"{key} is {config.get(key)}, expected {value}" for key, value in wanted.items() if config.get(key) != value
    ]
    boundary = config.get("eagle_aux_hidden_state_layer_ids") or []
    output = config["eagle_config"].get("eagle_aux_hidden_state_layer_ids") or []
    if not boundary or boundary != from_output_ids(output) or max(boundary) > target["num_hidden_layers"]:
        faults.append(f"aux layer ids {boundary} (boundary) and {output} (by output) do not name the same layers")
    if config["max_position_embeddings"] < target["max_position_embeddings"]:
        faults.append(
            f"max_position_embeddings {config['max_position_embeddings']} is shorter than the target's "
            f"{target['max_position_embeddings']}"
        )
    theta, scaling = read_rope(config)
    if theta != read_rope(target)[0]:
        faults.append(f"rope_theta is {theta}, the target's is {read_rope(target)[0]}")
    if not target.get("kv_lora_rank") and scaling != read_rope(target)[1]:  # an MLA target's is not for a Llama trunk
        faults.append(f"rope scaling is {scaling}, the target's is {read_rope(target)[1]}")
    if scaling is not None and not config.get("rope_scaling"):
        faults.append("rope scaling is only in rope_parameters: older readers lose it")
    return faults


def _tensor_faults(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    shapes = expected_shapes(config)
    faults = [f"{name} is missing" for name in shapes if name not in tensors]
    faults += [f"{name} is not a name that engines load" for name in tensors if name not in shapes]
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        dtype = {"d2t": torch.int64, "t2d": torch.bool}.get(name, _DTYPES[config["torch_dtype"]])
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            faults.append(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            faults.append(f"{name} holds NaN or infinite values")
    if not faults and "d2t" in shapes:
        try:
            check_vocab_map(tensors["d2t"], tensors["t2d"])
        except DataError as error:
            faults.append(str(error))
    return faults
