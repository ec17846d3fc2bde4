from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_kimi.errors import DataError
from eagle3_kimi.prompts.screening import Duplicates, EvaluationSets, ngrams_of, script_of, words_of

LONG = [f"word{index}" for index in range(100)]


def jaccard(first: list[str], second: list[str]) -> float:
    a, b = set(ngrams_of(first, 5)), set(ngrams_of(second, 5))
    return len(a & b) / len(a | b)


def test_exact_duplicates_ignore_case_and_punctuation() -> None:
    duplicates = Duplicates(near_threshold=None)
    assert duplicates.check("a", words_of("Name a colour.")) is None
    assert duplicates.check("b", words_of("name a COLOUR")) == "exact"
    assert duplicates.check("c", words_of("Name a colour, please.")) is None


def test_near_duplicates_by_jaccard_similarity() -> None:
    duplicates = Duplicates(near_threshold=0.8)
    near, far = LONG[2:], LONG[:60] + [f"other{index}" for index in range(40)]
    assert jaccard(LONG, near) > 0.95 > 0.5 > jaccard(LONG, far)
    assert duplicates.check("a", LONG) is None
    assert duplicates.check("b", near) == "near"
    assert duplicates.check("c", far) is None


def test_candidates_below_the_threshold_are_kept() -> None:
    # 32 bands of 4 rows look at a pair of similarity 0.6 with probability 1 - (1 - 0.6**4)**32 = 0.99:
    # the estimated similarity decides.
    duplicates, kept = Duplicates(near_threshold=0.9), 0
    for index in range(20):
        words = [f"{index}-{word}" for word in LONG]
        changed = [*words[:77], *(f"{index}-new{n}" for n in range(23))]
        assert 0.5 < jaccard(words, changed) < 0.7
        assert duplicates.check(f"{index}a", words) is None
        kept += duplicates.check(f"{index}b", changed) is None
    assert kept == 20


def test_leaks_share_thirteen_words() -> None:
    evaluation = EvaluationSets()
    evaluation.add_text("gsm8k", " ".join(LONG[:30]))
    evaluation.add_text("short", "Name a colour.")
    assert evaluation.find([["so", *LONG[10:23]]]) == "gsm8k"
    assert evaluation.find([["so", *LONG[10:22], "x", *LONG[30:60]]]) is None  # only 12 in a row
    assert evaluation.find([words_of("Name a colour")]) == "short"
    assert evaluation.find([words_of("Please name a colour.")]) is None


@pytest.mark.parametrize(
    "row",
    [{"question": "Q"}, {"problem": "Q"}, {"prompt": "Q"}, {"turns": ["Q", "R"]}, {"messages": [{"content": "Q"}]}],
)
def test_shapes_of_evaluation_sets(tmp_path: Path, row: dict[str, object]) -> None:
    text = " ".join(LONG[:20])
    file = tmp_path / "e.jsonl"
    file.write_text(json.dumps(row).replace("Q", text))
    evaluation = EvaluationSets()
    assert evaluation.add_file("e", file) >= 1
    assert evaluation.find([words_of(text)]) == "e"


def test_an_evaluation_set_without_text_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    file.write_text('{"x": 1}')
    with pytest.raises(DataError, match=r"keys found: x; keys understood: prompt"):
        EvaluationSets().add_file("e", file)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Go.", "latin"),
        ("Привет, go", "cyrillic"),
        ("两只猫", "cjk"),
        ("猫です", "japanese"),
        ("고양이", "hangul"),
        ("2+2", ""),
    ],
)
def test_scripts(text: str, script: str) -> None:
    assert script_of(text) == script
