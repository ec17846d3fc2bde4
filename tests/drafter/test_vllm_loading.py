"""The replayed rules against vLLM's own classes: what the check calls a fault is what vLLM stops at or leaves unfilled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.convert import convert_drafter
from eagle3_kimi.drafter.export import export_drafter
from eagle3_kimi.drafter.export_check import find_folder_faults
from eagle3_kimi.drafter.faults import verdict_of
from eagle3_kimi.drafter.layer_ids import write_layer_ids
from eagle3_kimi.drafter.loading import expected_shapes
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.vocab import build_vocab_map
from eagle3_kimi.target import resolve_target
from tests.drafter.test_export_check import Plant, add, put, rename, rewrite, tensor

PLANTED: dict[str, Plant] = {
    "as exported": put(),
    "names of speculators": rename("midlayer.", "layers.0."),
    "no mask": tensor("t2d", None),
    "an embedding of its own": lambda config, tensors: tensors.update({"embed_tokens.weight": torch.zeros(
        config["vocab_size"], config["hidden_size"])}),
    "a tensor less": tensor("midlayer.self_attn.k_proj.weight", None),
    "a norm less": tensor("midlayer.hidden_norm.weight", None),
    "no fc": tensor("fc.weight", None),
    "no map": tensor("d2t", None),
    "no head": tensor("lm_head.weight", None),
    "a tensor too many": add("mask_token", torch.ones(1)),
    "a prefix": rename("fc.", "model.fc."),
    "another shape": tensor("fc.weight", lambda x: x[:, :-1].contiguous()),
    "normed aux states": put(fc_norm=True),
    "two layers": put(num_hidden_layers=2),
    "two ids": put(**write_layer_ids([1, 2])),
    "another architecture": put(architectures=["LlamaForCausalLM"]),  # vLLM puts Eagle3 before it
}  # fmt: skip
SKIPPED_BY_VLLM: dict[str, Plant] = {
    "a norm too many": add("input_norm.weight", torch.ones(384)),
    "a bias": add("norm.bias", torch.ones(128)),
}


def write_mla_drafter(folder: Path, target_config: dict[str, Any], model_type: str) -> None:
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings",
            "rope_parameters", "rope_theta", "rope_scaling", "hidden_act", "dtype")  # fmt: skip
    config = {"model_type": model_type, **{key: target_config[key] for key in keys if key in target_config}}
    config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_hidden_layers": 1, **write_layer_ids([1, 2, 3])}
    config |= {"draft_vocab_size": config["vocab_size"], "num_key_value_heads": config["num_attention_heads"]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(config, "vllm", "mla")
    tensors = {name.replace("midlayer.", "layers.0."): torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.vllm
def test_vllm_loads_what_the_check_accepts_and_nothing_else(tiny_target: Path, tmp_path: Path) -> None:
    target = resolve_target(tiny_target)
    config = DrafterConfig.for_target(target.config, draft_vocab_size=300, aux_layer_ids=(1, 2, 3))
    model = DraftModel(config)
    vocab_map = build_vocab_map(torch.arange(target.vocab_size) % 7, draft_vocab_size=300)
    model.d2t.copy_(vocab_map.d2t)
    model.t2d.copy_(vocab_map.t2d)
    export_drafter(model, tmp_path / "as exported", target=target)
    convert_drafter(tmp_path / "as exported", tmp_path / "speculators", target=target, format="speculators")
    write_mla_drafter(tmp_path / "mla", target.config, "kimi_k2")
    write_mla_drafter(tmp_path / "mla for mtp", target.config, "deepseek_v3")
    convert_drafter(tmp_path / "mla for mtp", tmp_path / "mla converted", target=target)
    for name, plant in (PLANTED | SKIPPED_BY_VLLM).items():
        if name != "as exported":
            shutil.copytree(tmp_path / "as exported", tmp_path / name)
            rewrite(tmp_path / name, plant)
    names = [*PLANTED, *SKIPPED_BY_VLLM, "speculators", "mla", "mla for mtp", "mla converted"]
    (tmp_path / "cases.json").write_text(json.dumps([str(tmp_path / name) for name in names]))
    command = [sys.executable, "-m", "tests.drafter.load_in_vllm", str(tiny_target)]
    done = subprocess.run(
        [*command, str(tmp_path / "cases.json"), str(tmp_path / "out.json")],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = json.loads((tmp_path / "out.json").read_text())

    for name in names:
        came = loaded[str(tmp_path / name)]
        faults = find_folder_faults(tmp_path / name, engines=["vllm"])
        own_embedding = name == "an embedding of its own"
        unfilled = [place for place in came["unfilled"] if own_embedding or "embed_tokens" not in place]  # shared
        loads = came["stopped"] is None and not unfilled
        assert (verdict_of(faults) != "reject") == (loads and name not in SKIPPED_BY_VLLM), (
            name,
            came,
            [str(fault) for fault in faults],
        )
    assert loaded[str(tmp_path / "a norm less")]["unfilled"][-1].endswith("hidden_norm.weight")
