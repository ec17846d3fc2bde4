from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3_kimi.engines import SamplingOptions
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.errors import UsageError
from eagle3_kimi.generation.config import GenerationConfig, fingerprint, journal_key, request_seed
from eagle3_kimi.generation.rows import split_of
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.target import Target
from tests.generation.scripted import Bench

CONFIG = GenerationConfig(target="x")


def key_of(bench: Bench, config: GenerationConfig, revision: str = "r1") -> str:
    target = Target(name="x", path=bench.target, revision=revision)
    return fingerprint(journal_key(config, target, bench.tokenizer))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"engine": "transformers"},
        {"min_reasoning_tokens": 2},
        {"sampling": SamplingOptions(temperature=0.0)},
        {"sampling": SamplingOptions(top_p=0.9)},
        {"sampling": SamplingOptions(max_tokens=10)},
    ],
    ids=str,
)
def test_the_journal_key_covers_what_decides_a_sample(bench: Bench, change: dict[str, Any]) -> None:
    assert key_of(bench, replace(CONFIG, **change)) != key_of(bench, CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"options": EngineOptions(tensor_parallel_size=8, max_num_seqs=4)},
        {"journal_dir": Path("elsewhere")},
        {"retry_rejected": True},
        {"samples_per_prompt": 2},
        {"validation_fraction": 0.5},
        {"breaker_window": 7},
        {"capture": CaptureConfig(store=Path("features"))},
    ],
    ids=str,
)
def test_the_journal_key_leaves_out_what_does_not(bench: Bench, change: dict[str, Any]) -> None:
    assert key_of(bench, replace(CONFIG, **change)) == key_of(bench, CONFIG)


def test_the_journal_key_follows_target_template_and_tokenizer(bench: Bench) -> None:
    before = key_of(bench, CONFIG)
    assert key_of(bench, CONFIG, revision="r2") != before
    template = bench.tokenizer.chat_template
    try:
        bench.tokenizer.chat_template = template + " "
        assert key_of(bench, CONFIG) != before
    finally:
        bench.tokenizer.chat_template = template
    assert key_of(bench, CONFIG) == before


def test_seeds_differ_by_run_sample_and_attempt_and_fit_31_bits() -> None:
    seeds = {request_seed(run, name, attempt) for run in range(5) for name in "abc" for attempt in range(3)}
    assert len(seeds) == 45
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(0, "a") == request_seed(0, "a")


def test_the_split_is_a_property_of_the_conversation() -> None:
    names = [f"conversation-{number}" for number in range(2000)]
    share = sum(split_of(name, 0.1) == "validation" for name in names) / len(names)
    assert 0.08 < share < 0.12  # 0.1 give or take three standard deviations of 0.0067
    assert all(split_of(name, 0.0) == "train" for name in names)
    # A larger fraction only moves conversations into `validation`.
    assert all(split_of(n, 0.3) == "validation" for n in names if split_of(n, 0.1) == "validation")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples_per_prompt": 0}, "samples_per_prompt must be at least 1"),
        ({"validation_fraction": 1.0}, r"validation_fraction must lie in \[0, 1\)"),
        ({"engine": "server"}, "needs server_url"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperature", -0.1, r"temperature must lie in \[0, 2\]"),
        ("temperature", 2.5, r"temperature must lie in \[0, 2\], got 2.5"),
        ("top_p", 0.0, r"top_p must lie in \(0, 1\]"),
        ("max_tokens", 0, "max_tokens must be at least 1"),
    ],
)
def test_sampling_that_no_engine_takes_is_refused(option: str, value: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingOptions(**{option: value})
