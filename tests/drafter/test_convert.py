"""The published layouts, rebuilt from one drafter: each is recognised, diagnosed, and comes back as that drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_kimi.drafter.convert import convert_drafter
from eagle3_kimi.drafter.export_check import find_folder_faults
from eagle3_kimi.drafter.layer_ids import KEY
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.target import Target
from tests.drafter.test_export_check import put, rename, rewrite

Rewrite = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def as_specforge(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Our names; ids by output alone; one rope schema; no target_hidden_size."""
    for key in (KEY, "target_hidden_size", "rope_parameters", "dtype"):
        del config[key]


def as_specforge_of_transformers_5(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    as_specforge(config, tensors)
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    del config["rope_scaling"]


def as_model_optimizer(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """`layers.0.` names, no mask."""
    as_specforge(config, tensors)
    config["eagle_config"] |= {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    del tensors["t2d"]
    rename("midlayer.", "layers.0.")(config, tensors)


def as_torchspec(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    as_specforge(config, tensors)
    config["_torchspec_version"] = "0.1"
    rename("midlayer.", "layers.0.")(config, tensors)


def as_wrapped(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Saved from inside another module, with ids for offsets and tables that are computed anyway."""
    rename("", "model.")(config, tensors)
    tensors["model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.d2t"] += torch.arange(len(tensors["model.d2t"]))


LAYOUTS = {
    "SpecForge": as_specforge,
    "SpecForge with transformers 5": as_specforge_of_transformers_5,
    "NeMo / Model Optimizer": as_model_optimizer,
    "TorchSpec": as_torchspec,
    "eagle3-kimi, wrapped": as_wrapped,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_becomes_the_drafter_it_is(
    target: Target, exported: Path, tmp_path: Path, layout: str
) -> None:
    config, tensors = json.loads((exported / "config.json").read_text()), load_file(exported / "model.safetensors")
    rewrite(exported, LAYOUTS[layout])
    assert find_folder_faults(exported, target=target.config)  # as it is, no engine pair serves it

    done = convert_drafter(exported, tmp_path / "out", target=target)
    assert layout.startswith(done.layout)
    assert done.changes
    assert find_folder_faults(tmp_path / "out", target=target.config) == []
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(tensors)
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    came = json.loads((tmp_path / "out" / "config.json").read_text())
    nested = came.pop("eagle_config")
    assert nested == {**nested, **config.pop("eagle_config")}  # NeMo's own keys are kept beside ours
    assert came == {**came, **config}


def test_there_and_back_through_the_speculators_layout(target: Target, exported: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((exported / "config.json").read_text()), load_file(exported / "model.safetensors")
    convert_drafter(exported, tmp_path / "spec", target=target, format="speculators")
    assert find_folder_faults(tmp_path / "spec", target=target.config, engines=["vllm"]) == []
    done = convert_drafter(tmp_path / "spec", tmp_path / "back", target=target)
    assert done.layout == "speculators"
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert all(back[key] == config[key] for key in config)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert set(written) == set(tensors)


def test_vllm_alone_serves_norm_variants_in_the_speculators_layout(
    target: Target, exported: Path, tmp_path: Path
) -> None:
    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["eagle_config"]["norm_before_fc"] = config["norm_output"] = True
        tensors["input_norm.weight"] = torch.ones(96)

    rewrite(exported, plant)
    convert_drafter(exported, tmp_path / "spec", target=target, format="speculators")
    config = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert (config["norm_before_fc"], config["norm_output"], config["fc_norm"]) == (True, True, False)


def test_weights_are_cast_to_the_declared_dtype(target: Target, exported: Path, tmp_path: Path) -> None:
    rewrite(exported, put(dtype="bfloat16", torch_dtype="bfloat16"))
    (fault,) = find_folder_faults(exported, target=target.config)
    assert fault.repairable
    convert_drafter(exported, tmp_path / "out", target=target)
    before, after = load_file(exported / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["fc.weight"], before["fc.weight"].bfloat16())
    assert after["d2t"].dtype == torch.int64


def test_the_map_of_a_full_vocabulary_is_left_out(target: Target, exported: Path, tmp_path: Path) -> None:
    """SpecForge always writes one; vLLM stops at it."""
    size, hidden = 40, 32

    def widen(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["draft_vocab_size"] = size
        tensors["lm_head.weight"] = torch.ones(size, hidden)
        tensors["d2t"], tensors["t2d"] = torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool)

    rewrite(exported, widen)
    assert [fault.name for fault in find_folder_faults(exported, target=target.config)] == ["d2t_without_reduction"]
    convert_drafter(exported, tmp_path / "out", target=target)
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")


REFUSED: list[tuple[str, Rewrite, str]] = [
    ("norms", put(norm_output=True), "extra_norms: norm_output is on"),
    ("EAGLE-1", put(architectures=["LlamaForCausalLMEagle"]), "no engine serves architectures"),
    ("no head", lambda config, tensors: tensors.pop("lm_head.weight"), "missing_lm_head"),
    ("no map", lambda config, tensors: tensors.pop("d2t"), "missing_d2t"),
    ("short", put(max_position_embeddings=64), "draft_context_too_short"),
    ("rope", put(rope_theta=1e6, rope_parameters=None), "rope_differs_from_target"),
    ("unknown tensor", lambda config, tensors: tensors.update(extra=torch.ones(1)), "tensor_names_unknown_to_engine"),
    ("two ropes", put(rope_theta=5e4), "rope_schemas_disagree"),
    ("two sets of layers", put(eagle_config={KEY: [1, 2, 3]}), "give their boundary ids"),
    ("one hidden state", put(eagle_config={KEY: [0, 1, 2], "use_aux_hidden_state": False}), "no_aux_hidden_states"),
    ("a norm before fc", put(eagle_config={KEY: [0, 1, 2], "norm_before_fc": True}), "extra_norms: norm_before_fc"),
    ("a tied head", put(tie_word_embeddings=True), "tied_embeddings"),
    ("a map out of range", lambda config, tensors: tensors["d2t"].add_(1000), "d2t_out_of_range"),
    ("embedding layer", put(**{KEY: [0, 1, 2], "eagle_config": None}), "boundary id 0"),
]


@pytest.mark.parametrize(("plant", "why"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_would_lose_something_is_refused(
    target: Target, exported: Path, tmp_path: Path, plant: Rewrite, why: str
) -> None:
    rewrite(exported, plant)
    with pytest.raises(DataError, match=why):
        convert_drafter(exported, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_speculators_configs_that_vllm_stops_at(target: Target, exported: Path, tmp_path: Path) -> None:
    convert_drafter(exported, tmp_path / "spec", target=target, format="speculators")
    config = json.loads((tmp_path / "spec" / "config.json").read_text())
    for broken, why in [
        ({"speculators_config": {**config["speculators_config"], "verifier": {}}}, "verifier.name_or_path"),
        ({"speculators_config": {**config["speculators_config"], "proposal_methods": []}}, "proposal_methods"),
        ({"speculators_config": None}, "verifier.name_or_path"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type"),
    ]:
        (tmp_path / "spec" / "config.json").write_text(json.dumps({**config, **broken}))
        faults = find_folder_faults(tmp_path / "spec", engines=["vllm"])
        assert {fault.name for fault in faults} == {"invalid_speculators_config"}
        assert any(why in fault.sentence for fault in faults)
        with pytest.raises(DataError, match="invalid_speculators_config"):
            convert_drafter(tmp_path / "spec", tmp_path / "out")
    del config["norm_before_residual"]
    (tmp_path / "spec" / "config.json").write_text(json.dumps(config))
    (fault,) = find_folder_faults(tmp_path / "spec", engines=["vllm"])
    assert "vLLM takes it for true" in fault.sentence


def test_ids_that_the_directory_does_not_tell(target: Target, exported: Path, tmp_path: Path) -> None:
    rewrite(exported, lambda config, tensors: [config.pop(KEY), config.pop("eagle_config")])
    with pytest.raises(DataError, match="give their boundary ids"):
        convert_drafter(exported, tmp_path / "out", target=target)  # 4 layers have no default
    convert_drafter(exported, tmp_path / "out", target=target, aux_layer_ids=[1, 2, 3])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config[KEY], config["eagle_config"][KEY]) == ([1, 2, 3], [0, 1, 2])


def test_wrong_usage(target: Target, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its own conversion"):
        convert_drafter(exported, exported, target=target)
    with pytest.raises(UsageError, match="give it with --target"):
        convert_drafter(exported, tmp_path / "out", format="speculators")
    save_file({"fc.weight": torch.ones(1), "model.fc.weight": torch.ones(1)}, exported / "model.safetensors")
    with pytest.raises(DataError, match=r"two tensors for fc\.weight"):
        convert_drafter(exported, tmp_path / "out", target=target)
