from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_kimi.drafter.config import DrafterConfig, default_aux_layer_ids
from eagle3_kimi.drafter.export import build_export_config, check_export, export_drafter
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.vocab import build_vocab_map
from eagle3_kimi.errors import DataError
from eagle3_kimi.target import Target
from tests.training.toy import AUX, HIDDEN, VOCAB, ToyTarget


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return ToyTarget().save(tmp_path / "target")


def build_drafter(target: Target, draft_vocab_size: int) -> DraftModel:
    model = DraftModel(DrafterConfig.for_target(target.config, draft_vocab_size=draft_vocab_size, aux_layer_ids=AUX))
    if draft_vocab_size < VOCAB:
        vocab_map = build_vocab_map(torch.arange(VOCAB), draft_vocab_size=draft_vocab_size)
        model.d2t.copy_(vocab_map.d2t)
        model.t2d.copy_(vocab_map.t2d)
    return model


@pytest.mark.parametrize("draft_vocab_size", [12, VOCAB])
def test_round_trip(target: Target, tmp_path: Path, draft_vocab_size: int) -> None:
    model = build_drafter(target, draft_vocab_size)
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


def test_drafter_of_an_mla_target() -> None:
    config = DrafterConfig.for_target(KIMI_TEXT_CONFIG, draft_vocab_size=32000)

    assert config.aux_layer_ids == (2, 30, 58)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 64, 128)
    assert (config.rope_theta, config.rope_scaling, config.max_position_embeddings) == (50000.0, None, 262144)


def _set(key: str, value: Any) -> Callable[[dict, dict], object]:
    return lambda config, tensors: config.__setitem__(key, value)


FAULTS: list[tuple[Callable[[dict, dict], object], str]] = [
    (lambda config, tensors: tensors.pop("lm_head.weight"), "lm_head.weight is missing"),
    (lambda config, tensors: tensors.pop("d2t"), "d2t is missing"),
    (lambda config, tensors: tensors.update(extra=torch.zeros(1)), "extra is not a name"),
    (lambda config, tensors: tensors.update({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}), "fc.weight is"),
    (lambda config, tensors: tensors["norm.weight"].fill_(torch.nan), "NaN"),
    (lambda config, tensors: tensors["d2t"].zero_(), "disagree"),
    (lambda config, tensors: config.pop("draft_vocab_size"), "lacks draft_vocab_size"),
    (lambda config, tensors: config.pop("target_hidden_size"), "lacks target_hidden_size"),
    (_set("architectures", ["Qwen3ForCausalLM"]), "architectures"),
    (_set("max_position_embeddings", 32), "shorter than the target's"),
    (_set("eagle_aux_hidden_state_layer_ids", [0, 1, 2]), "do not name the same layers"),
    (_set("torch_dtype", "bfloat16"), "expected torch.bfloat16"),
    (_set("rope_parameters", {"rope_theta": 1e6, "rope_type": "default"}), "rope_theta is 1000000.0"),
    (_set("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}), "older readers"),
]


@pytest.mark.parametrize(("break_it", "match"), FAULTS, ids=[match for _, match in FAULTS])
def test_faults_are_named(target: Target, tmp_path: Path, break_it: Callable[[dict, dict], object], match: str) -> None:
    folder = tmp_path / "drafter"
    export_drafter(build_drafter(target, 12), folder, target=target)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    check_export(folder, target)

    break_it(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DataError, match=match):
        check_export(folder, target)
