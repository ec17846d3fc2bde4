"""The tiny target has Kimi's shape, and reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_kimi.engines import open_engine
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.evaluation.tiny_answers import measure_answers
from eagle3_kimi.target import resolve_target
from eagle3_kimi.tiny.problems import KINDS, generate_problems
from eagle3_kimi.tiny.training import TinyTraining, train_tiny_target


def test_it_has_kimis_architecture(tiny_target: Path) -> None:
    target = resolve_target(tiny_target)
    config = target.config
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["rope_parameters"]["factor"] == 64.0
    assert config["tie_word_embeddings"] is False
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(target.tensor_files)


def test_it_reasons_answers_and_stops(tiny_target: Path) -> None:
    target = resolve_target(tiny_target)
    engine = open_engine("transformers", target, EngineOptions(dtype="float32"))
    report = measure_answers(target, engine)
    engine.close()
    assert report.problems == 120
    assert report.complete >= 0.95 * report.problems
    assert report.correct >= 0.60 * report.problems


def test_problems_depend_on_the_seed_alone() -> None:
    assert list(generate_problems(9, 7)) == list(generate_problems(9, 7))
    assert list(generate_problems(9, 7)) != list(generate_problems(9, 8))
    assert [problem.kind for problem in generate_problems(6, 0)] == [*KINDS, *KINDS]


def test_training_is_seeded_and_cached_whole(tmp_path: Path) -> None:
    short = TinyTraining(steps=2, batch_size=2, num_problems=64)
    first = train_tiny_target(tmp_path / "a", short)
    second = train_tiny_target(tmp_path / "b", short)
    assert first.name == second.name  # the fingerprint
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert train_tiny_target(tmp_path / "a", short) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    assert {path.suffix for path in (tmp_path / "a").iterdir()} <= {"", ".lock"}  # no half-made folder is left


def test_another_setting_is_another_target(tmp_path: Path) -> None:
    from eagle3_kimi.tiny.training import _fingerprint

    assert _fingerprint(TinyTraining()) != _fingerprint(TinyTraining(seed=1))
    with pytest.raises(TypeError):
        TinyTraining(3)  # type: ignore[misc]
