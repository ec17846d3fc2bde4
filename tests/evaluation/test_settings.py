from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_kimi.errors import UsageError
from eagle3_kimi.evaluation.settings import (
    EvaluationConfig,
    choose,
    list_samplings,
    own_sampling,
    parse_draft_lengths,
)
from eagle3_kimi.target import Target


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("3", (3,)), ("1..8", (1, 2, 3, 4, 5, 6, 7, 8)), ("1,3,5", (1, 3, 5)), ("5, 1..2,2", (1, 2, 5))],
)
def test_draft_lengths(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_draft_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "3..1", "1..", "two", "1;2", "-1", "1..99"])
def test_draft_lengths_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="draft lengths"):
        parse_draft_lengths(text)


def build_config(folder: Path, **changes: object) -> EvaluationConfig:
    (folder / "config.json").write_text("{}")
    target = Target(name="here", path=folder, revision="0")
    values = {"drafter": folder, "target": target, "prompts": (folder / "x.jsonl",), "output": folder, **changes}
    return EvaluationConfig(**values)  # type: ignore[arg-type]


def test_kimi_samples_as_its_card_says(tmp_path: Path) -> None:
    samplings = list_samplings(build_config(tmp_path), "kimi-k2.5")
    assert [(s.thinking, s.temperature, s.top_p) for s in samplings] == [
        (True, 0.0, 1.0),
        (True, 1.0, 0.95),
        (False, 0.0, 1.0),
        (False, 0.6, 0.95),
    ]


def test_others_sample_as_their_folder_says(tmp_path: Path) -> None:
    target = Target(name="here", path=tmp_path, revision="0")
    none = own_sampling(target, "qwen3", True)
    assert (none.temperature, none.top_p, none.source) == (1.0, 1.0, "the model names none: plain sampling")
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_p": 0.8}))
    named = own_sampling(target, "qwen3", True)
    assert (named.temperature, named.top_p, named.source) == (0.7, 0.8, "generation_config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ()}, "at least one file with --prompts"),
        ({"thinking": ()}, "nothing to measure"),
        ({"drafter": Path("nowhere")}, r"nowhere holds no drafter: it has no config\.json"),
        ({"max_tokens": 0}, "at least 1"),
        ({"limit": 0}, "at least 1"),
        ({"engine": "sglang"}, "the engine is vllm, or transformers to simulate alone; not 'sglang'"),
        ({"engine": "transformers"}, "wants --temperature greedy"),
    ],
)
def test_wrong_settings_are_one_sentence(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        build_config(tmp_path, **changes)


def test_one_or_both() -> None:
    assert choose("both", ("on", "off"), "--thinking") == ("on", "off")
    assert choose("off", ("on", "off"), "--thinking") == ("off",)
    with pytest.raises(UsageError, match="--thinking is on, off or both, not 'maybe'"):
        choose("maybe", ("on", "off"), "--thinking")
