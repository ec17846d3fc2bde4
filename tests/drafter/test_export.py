from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_kimi.drafter.config import DrafterConfig, default_aux_layer_ids
from eagle3_kimi.drafter.export import build_export_config, export_drafter, write_drafter
from eagle3_kimi.drafter.export_check import check_export
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.errors import DataError
from eagle3_kimi.target import Target
from tests.training.toy import AUX, VOCAB

KIMI_TEXT_CONFIG = {
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize("draft_vocab_size", [12, VOCAB])
def test_round_trip(
    target: Target, build_drafter: Callable[[int], DraftModel], tmp_path: Path, draft_vocab_size: int
) -> None:
    model = build_drafter(draft_vocab_size)
    export_drafter(model, tmp_path / "drafter", target=target)

    written = load_file(tmp_path / "drafter" / "model.safetensors")
    state = model.state_dict()
    assert set(written) == set(state)
    assert ("d2t" in written) == (draft_vocab_size < VOCAB)  # vLLM has no place for a map over the full vocabulary
    assert all(torch.equal(written[name], state[name]) for name in state)
    other = DraftModel(model.config)
    other.load_state_dict(written)


def test_both_layer_numberings_and_both_rope_schemas(target: Target) -> None:
    config = replace(
        DrafterConfig.for_target(target.config, draft_vocab_size=12, aux_layer_ids=AUX),
        aux_layer_ids=(2, 30, 58),
        target_num_layers=61,
        rope_scaling={"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    )
    written = build_export_config(config, "bfloat16")

    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert written["rope_parameters"]["rope_type"] == written["rope_scaling"]["type"] == "yarn"
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"] == 10000.0


def test_default_aux_layer_ids() -> None:
    assert default_aux_layer_ids(61) == (2, 30, 58)
    with pytest.raises(DataError, match="name them"):
        default_aux_layer_ids(4)
    with pytest.raises(DataError, match=r"within 0\.\.61"):
        DrafterConfig.for_target(KIMI_TEXT_CONFIG, draft_vocab_size=32000, aux_layer_ids=(2, 30, 99))


def test_drafter_of_an_mla_target() -> None:
    config = DrafterConfig.for_target(KIMI_TEXT_CONFIG, draft_vocab_size=32000)

    assert config.aux_layer_ids == (2, 30, 58)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 64, 128)
    assert (config.rope_theta, config.rope_scaling, config.max_position_embeddings) == (50000.0, None, 262144)


def test_the_speculators_layout_holds_the_same_drafter(
    target: Target, build_drafter: Callable[[int], DraftModel], exported: Path, tmp_path: Path
) -> None:
    model = build_drafter(12)
    write_drafter(model.config, model.state_dict(), tmp_path / "spec", target=target, format="speculators")

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (exported, tmp_path / "spec"))
    assert {name.replace("layers.0.", "midlayer.") for name in theirs} == set(ours)
    assert all(torch.equal(theirs[name.replace("midlayer.", "layers.0.")], ours[name]) for name in ours)
    config = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(AUX)
    assert config["norm_before_residual"] is False  # vLLM's default is true
    assert config["speculators_config"]["verifier"]["name_or_path"] == target.name
    check_export(tmp_path / "spec", target, engines=("vllm",))
    with pytest.raises(DataError, match="layout_unknown_to_engine: SGLang does not read"):
        check_export(tmp_path / "spec", target)


def test_what_would_not_serve_does_not_replace_what_does(
    target: Target, build_drafter: Callable[[int], DraftModel], exported: Path
) -> None:
    model = build_drafter(12)
    before = (exported / "model.safetensors").read_bytes()
    tensors = model.state_dict()
    tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], torch.nan)
    with pytest.raises(DataError, match=r"not_finite: norm\.weight holds NaN"):
        write_drafter(model.config, tensors, exported, target=target)
    assert (exported / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in exported.parent.iterdir()) == ["drafter", "target"]
