"""Faults planted one at a time in a directory that serves: each is found by its name, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_kimi.drafter.export_check import check_export, find_faults, find_folder_faults
from eagle3_kimi.drafter.faults import Fault, FaultName, verdict_of
from eagle3_kimi.drafter.folder import TensorFacts
from eagle3_kimi.drafter.layer_ids import KEY, find_layer_id_faults, number_for_engine, stated_ids
from eagle3_kimi.drafter.layouts import read_layout
from eagle3_kimi.drafter.loading import expected_shapes
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.target import Target
from tests.training.toy import HIDDEN, VOCAB

Plant = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def rewrite(folder: Path, plant: Plant) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    plant(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def put(**values: Any) -> Plant:
    return lambda config, tensors: config.update(values)


def drop(*keys: str) -> Plant:
    return lambda config, tensors: [config.pop(key) for key in keys]


def rename(old: str, new: str) -> Plant:
    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return plant


def add(name: str, value: torch.Tensor) -> Plant:
    return lambda config, tensors: tensors.update({name: value})


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Plant:
    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        came = tensors.pop(name)
        if change is not None:
            tensors[name] = change(came)

    return plant


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
PLANTED: list[tuple[str, Plant, set[str]]] = [
    ("another architecture", put(architectures=["Qwen3ForCausalLM"]), {"architecture_not_eagle3"}),
    ("no architecture", drop("architectures"), {"architecture_not_eagle3"}),
    ("no draft vocabulary", drop("draft_vocab_size"), {"missing_draft_vocab_size", "shape_differs", "d2t_without_reduction"}),
    ("another vocabulary", put(vocab_size=VOCAB + 1), {"vocab_size_differs", "shape_differs"}),
    ("another target size", put(target_hidden_size=64), {"target_hidden_size_differs", "shape_differs"}),
    ("short context", put(max_position_embeddings=32), {"draft_context_too_short"}),
    ("no context", drop("max_position_embeddings"), set()),  # 2048 by default, the toy target has 256
    ("another theta", put(rope_theta=1e6, rope_parameters={"rope_theta": 1e6}), {"rope_differs_from_target"}),
    ("a scaling", put(rope_scaling=YARN, rope_parameters={"rope_theta": 1e4, **YARN}), {"rope_differs_from_target"}),
    ("two thetas", put(rope_theta=5e4), {"rope_schemas_disagree"}),
    ("one rope schema", drop("rope_theta"), {"write_both_rope_schemas"}),
    ("the old rope schema alone", drop("rope_parameters"), set()),
    ("boundary ids twice", put(eagle_config={KEY: [1, 2, 3]}), {"layer_ids_name_other_tensors", "layer_ids_out_of_range"}),
    ("output ids twice", put(**{KEY: [0, 1, 2]}), {"layer_ids_name_other_tensors", "layer_ids_out_of_range"}),
    ("output ids alone", drop(KEY), {"layer_ids_name_other_tensors", "layer_ids_out_of_range"}),
    ("boundary ids alone", drop("eagle_config"), {"layer_ids_name_other_tensors"}),
    ("no ids", drop(KEY, "eagle_config"), {"layer_ids_out_of_range"}),
    ("ids out of order", put(**{KEY: [3, 2, 1], "eagle_config": {KEY: [2, 1, 0]}}), {"layer_ids_out_of_range"}),
    ("two ids", put(**{KEY: [1, 2], "eagle_config": {KEY: [0, 1]}}), {"layer_ids_count", "shape_differs"}),
    ("norm before the residual", put(norm_before_residual=True), {"extra_norms"}),
    ("normed output", put(norm_output=True), {"extra_norms"}),
    ("normed aux states", put(fc_norm=True), {"extra_norms", "missing_tensors"}),
    ("tied", put(tie_word_embeddings=True), {"tied_embeddings"}),
    ("one hidden state", put(eagle_config={KEY: [0, 1, 2], "use_aux_hidden_state": False}), {"no_aux_hidden_states"}),
    ("biases", put(attention_bias=True), {"biases"}),
    ("sizes in quotes", put(hidden_size="32"), {"malformed_config"}),
    ("ids in quotes", put(eagle_config={KEY: ["0", "1", "2"]}), {"malformed_config"}),
    ("one architecture", put(architectures="LlamaForCausalLMEagle3"), {"malformed_config"}),
    ("a rope of words", put(rope_scaling="yarn"), {"malformed_config"}),
    ("quantised", put(quantization_config={"quant_method": "fp8"}), {"quantised"}),
    ("two layers", put(num_hidden_layers=2), {"more_than_one_layer", "missing_tensors"}),
    ("no norm epsilon", drop("rms_norm_eps"), {"missing_config_keys"}),
    ("a checkpoint", rename("", "draft_model."), {"training_checkpoint"}),
    ("names of speculators", rename("midlayer.", "layers.0."), {"tensor_names_unknown_to_engine", "missing_tensors"}),
    ("a prefix", rename("fc.", "model.fc."), {"tensor_names_unknown_to_engine", "missing_tensors"}),
    ("a bias", rename("norm.weight", "norm.bias"), {"extra_norms", "missing_tensors"}),
    ("a norm too many", add("input_norm.weight", torch.ones(3 * HIDDEN)), {"extra_norms"}),
    ("a tensor too many", add("mask_token", torch.ones(1)), {"tensor_names_unknown_to_engine"}),
    ("a tensor less", tensor("midlayer.mlp.up_proj.weight", None), {"missing_tensors"}),
    ("no head", tensor("lm_head.weight", None), {"missing_lm_head"}),
    ("no map", tensor("d2t", None), {"missing_d2t"}),
    ("no mask", tensor("t2d", None), set()),  # no engine reads it
    ("a map for nothing", put(draft_vocab_size=VOCAB), {"d2t_without_reduction", "shape_differs"}),
    ("another shape", tensor("fc.weight", lambda x: torch.zeros(HIDDEN, HIDDEN)), {"shape_differs"}),
    ("another dtype", tensor("fc.weight", lambda x: x.bfloat16()), {"cast_to_declared_dtype"}),
    ("declared otherwise", put(dtype="bfloat16"), {"cast_to_declared_dtype"}),
    ("integers", tensor("fc.weight", lambda x: x.to(torch.int8)), {"quantised"}),
    ("NaN and another dtype", lambda config, tensors: tensors.update({"norm.weight": torch.full((HIDDEN,), torch.nan).half()}), {"not_finite", "cast_to_declared_dtype"}),
    ("NaN", tensor("norm.weight", lambda x: torch.full_like(x, torch.nan)), {"not_finite"}),
    ("ids for offsets", tensor("d2t", lambda x: x + torch.arange(12)), {"d2t_holds_ids"}),
    ("a map out of range", tensor("d2t", lambda x: x - 40), {"d2t_out_of_range"}),
    ("a map onto one id", tensor("d2t", lambda x: 20 - torch.arange(12)), {"d2t_repeats"}),
    ("another mask", tensor("t2d", lambda x: ~x), {"d2t_t2d_disagree"}),
    ("no offsets", tensor("d2t", torch.zeros_like), {"d2t_t2d_disagree"}),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "names"), [row[1:] for row in PLANTED], ids=[row[0] for row in PLANTED])
def test_a_planted_fault_is_named(target: Target, exported: Path, plant: Plant, names: set[str]) -> None:
    check_export(exported, target)
    rewrite(exported, plant)
    faults = find_folder_faults(exported, target=target.config)
    assert {str(fault.name) for fault in faults} == names, [str(fault) for fault in faults]
    if names:
        with pytest.raises(DataError, match=r"would not serve"):
            check_export(exported, target)


def test_every_name_is_planted_somewhere() -> None:
    planted = set().union(*(names for _, _, names in PLANTED))
    elsewhere = {
        "invalid_speculators_config",
        "layout_unknown_to_engine",
        "missing_target_hidden_size",
        "missing_embed_tokens",
    }
    assert planted | elsewhere == set(FaultName)


def test_a_drafter_of_another_width(target: Target, exported: Path) -> None:
    """Half as wide as its target: `fc` takes the target's states, and the embedding cannot be shared."""
    rewrite(exported, put(target_hidden_size=2 * HIDDEN))
    rewrite(exported, tensor("fc.weight", lambda x: torch.zeros(HIDDEN, 6 * HIDDEN)))
    wide = {**target.config, "hidden_size": 2 * HIDDEN}
    assert [fault.name for fault in find_folder_faults(exported, target=wide)] == ["missing_embed_tokens"]
    rewrite(exported, add("embed_tokens.weight", torch.zeros(VOCAB, HIDDEN)))
    assert find_folder_faults(exported, target=wide) == []
    rewrite(exported, drop("target_hidden_size"))
    names = [fault.name for fault in find_folder_faults(exported, target=wide)]
    assert names[0] == "missing_target_hidden_size"


def test_an_engine_is_judged_by_its_own_rules(target: Target, exported: Path) -> None:
    rewrite(exported, rename("midlayer.", "layers.0."))
    assert find_folder_faults(exported, target=target.config, engines=["vllm"]) == []
    silent, random = find_folder_faults(exported, target=target.config, engines=["sglang"])
    assert "layers.0.hidden_norm.weight" in silent.sentence
    assert "SGLang skips names it does not know in silence" in silent.sentence
    assert "midlayer" in random.sentence
    rewrite(exported, rename("layers.0.", "model.midlayer."))  # the one prefix that SGLang strips
    assert find_folder_faults(exported, target=target.config, engines=["sglang"]) == []
    with pytest.raises(UsageError, match="the engines are vllm, sglang, not tgi"):
        find_folder_faults(exported, engines=["tgi"])


def test_verdicts(target: Target, exported: Path) -> None:
    assert verdict_of(find_folder_faults(exported, target=target.config)) == "accept"
    rewrite(exported, drop("rope_theta"))
    assert verdict_of(find_folder_faults(exported, target=target.config)) == "repair"
    rewrite(exported, drop("draft_vocab_size"))
    assert verdict_of(find_folder_faults(exported, target=target.config)) == "reject"


def find_id_faults(config: dict[str, Any], names: Sequence[str] = ()) -> list[Fault]:
    """For both engines and a target of Kimi's 61 layers."""
    layout = read_layout(config, names)
    return find_layer_id_faults(config, ["vllm", "sglang"], num_layers=61, trained=stated_ids(layout, 61))


def test_both_numberings_name_the_same_tensors() -> None:
    assert number_for_engine([2, 30, 58], "sglang") == [1, 29, 57]
    assert number_for_engine([2, 30, 58], "vllm") == [2, 30, 58]
    with pytest.raises(DataError, match="boundary id 0"):
        number_for_engine([0, 30, 58], "sglang")
    (fault,) = find_id_faults({"eagle_config": {KEY: [1, 29, 57]}})
    assert "vllm would capture boundary ids [1, 29, 57], the drafter was trained on [2, 30, 58]" in fault.sentence
    (fault,) = find_id_faults({"eagle_config": {KEY: [2, 30, 58]}})  # the default ids: boundary numbering
    assert "sglang would capture boundary ids [3, 31, 59]" in fault.sentence
    torchspec = {"eagle_config": {KEY: [4, 30, 58]}, "_torchspec_version": "0.1", "model_type": "kimi_k2"}
    (fault,) = find_id_faults(torchspec, ["layers.0.hidden_norm.weight"])  # as it exports for vLLM
    assert "sglang would capture boundary ids [5, 31, 59], the drafter was trained on [4, 30, 58]" in fault.sentence
    assert find_id_faults({KEY: [2, 30, 58]}) == []  # SGLang's default
    assert find_id_faults({}) == []
    (fault,) = find_layer_id_faults({}, ["vllm"], num_layers=61, trained=[3, 30, 58])
    assert "trained on [3, 30, 58]" in fault.sentence
    (fault,) = find_id_faults({KEY: [2, 30, 61], "eagle_config": {KEY: [1, 29, 60]}})
    assert "sglang captures boundary ids within 1..60" in fault.sentence


MLA_CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    KEY: [2, 30, 58],
    "eagle_config": {KEY: [1, 29, 57]},
}


def test_an_mla_drafter_is_understood() -> None:
    shapes = expected_shapes(MLA_CONFIG, "vllm", "mla")
    assert shapes["midlayer.self_attn.kv_a_proj_with_mqa.weight"] == (576, 14336)  # 512 + 64, 2 x 7168
    assert shapes["midlayer.self_attn.q_b_proj.weight"] == (64 * 192, 1536)
    tensors = {name.replace("midlayer.", "layers.0."): TensorFacts(shape, "bfloat16") for name, shape in shapes.items()}
    assert find_faults(MLA_CONFIG, tensors) == []
    del tensors["layers.0.self_attn.kv_b_proj.weight"]
    assert {fault.name for fault in find_faults(MLA_CONFIG, tensors)} == {"missing_tensors"}


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        find_folder_faults(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match="holds a list"):
        find_folder_faults(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(DataError, match=r"pytorch_model\.bin may run code when read"):
        find_folder_faults(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(DataError, match="is damaged"):
        find_folder_faults(tmp_path)
