"""The directory that engines load: `eagle3` for vLLM and SGLang, `speculators` for vLLM and the speculators library.

Engines read different keys for the same thing, in silence. So both layer numberings and both rope schemas are written,
and what was written is checked before it takes its place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from eagle3_kimi.drafter.config import DrafterConfig, write_rope
from eagle3_kimi.drafter.export_check import find_folder_faults
from eagle3_kimi.drafter.folder import DTYPES
from eagle3_kimi.drafter.layer_ids import KEY, write_layer_ids
from eagle3_kimi.drafter.layouts import NORM_FLAGS
from eagle3_kimi.drafter.loading import ENGINES, norm_flag
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.target import Target

Format = Literal["eagle3", "speculators"]

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SPECULATIVE_TOKENS = 3  # what `vllm serve DIR` proposes when nobody says otherwise


def export_drafter(model: DraftModel, out_dir: Path, *, target: Target, dtype: str | None = None) -> None:
    """Writes `config.json` and `model.safetensors`, checked, whole or not at all. See `write_drafter`."""
    write_drafter(model.config, model.state_dict(), out_dir, target=target, dtype=dtype)


def write_drafter(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    out_dir: Path,
    *,
    target: Target,
    dtype: str | None = None,
    format: Format = "eagle3",
) -> None:
    """Writes a drafter from its tensors (`DraftModel.state_dict()`).

    Args:
        config: the drafter's.
        tensors: under the exported names.
        out_dir: replaced if it exists.
        target: the target it was trained for.
        dtype: `float32`, `bfloat16` or `float16`; the target's own by default.
        format: the layout.

    Raises:
        DataError: what was written would not serve; `out_dir` is as it was.
    """
    dtype = dtype or str(target.config.get("dtype") or target.config.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise DataError(f"a drafter is exported as one of {', '.join(DTYPES)}, not {dtype}")
    cast = {
        name: (tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor).cpu()
        for name, tensor in tensors.items()
    }
    write_folder(build_export_config(config, dtype), cast, out_dir, target=target, format=format)


def write_folder(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    out_dir: Path,
    *,
    target: Target | None,
    format: Format = "eagle3",
) -> None:
    """Writes an `eagle3` configuration and its tensors in either layout; checked, whole or not at all.

    Raises:
        DataError: what was written would not serve; `out_dir` is as it was.
        UsageError: the speculators layout names the target, and none was given.
    """
    if format == "speculators":
        if target is None:
            raise UsageError("the speculators layout names the target model: give it with --target")
        config, tensors = build_speculators_config(config, target), _name_for_speculators(tensors)
    temporary = out_dir.with_name(f".{out_dir.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    engines = ("vllm",) if format == "speculators" else ENGINES
    faults = find_folder_faults(temporary, target=None if target is None else target.config, engines=engines)
    if faults:
        shutil.rmtree(temporary)
        raise DataError("what would be written does not serve: " + "; ".join(map(str, faults)))
    shutil.rmtree(out_dir, ignore_errors=True)
    os.replace(temporary, out_dir)


def build_export_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """`config.json`: each key that vLLM or SGLang reads."""
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
        **write_rope(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        **write_layer_ids(config.aux_layer_ids),
    }


def build_speculators_config(config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The same drafter as the speculators library and vLLM's reader of it want it told.

    Every norm flag is written: what is left out, the two take for different things.
    """
    whole = json.loads((target.path / "config.json").read_text(encoding="utf-8"))
    apart = {"architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", KEY, *NORM_FLAGS}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": whole.get("architectures") or []},
        },
        "transformer_layer_config": {key: value for key, value in config.items() if key not in apart},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        KEY: config[KEY],
        **{flag: norm_flag(config, flag) for flag in NORM_FLAGS},
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
    }


def _name_for_speculators(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
