from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_kimi.errors import DataError
from eagle3_kimi.evaluation.benchmarks import SHAPES, Benchmark, detect_shape, load_benchmark

SPEED_BENCH = {
    "question_id": "q1",
    "category": "coding",
    "sub_category": "python",
    "turns": ["Write a sort.", "Make it stable."],
    "source": "somewhere",
    "src_id": "7",
    "difficulty": "easy",
    "multiturn": True,
}
ROWS: dict[str, dict[str, Any]] = {
    "SPEED-Bench": SPEED_BENCH,
    "MT-Bench": {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Shorter."]},
    "HumanEval": {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "canonical_solution": "...",
        "test": "...",
    },
    "MATH-500": {
        "problem": "What is $1+1$?",
        "solution": "$1+1=\\boxed{2}$",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "GSM8K": {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"},
}


def load(folder: Path, *rows: Any, name: str = "questions.jsonl", **options: Any) -> Benchmark:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file = folder / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return load_benchmark(file, **options)


@pytest.mark.parametrize("shape", list(ROWS))
def test_each_benchmark_is_known_by_its_keys(shape: str, tmp_path: Path) -> None:
    benchmark = load(tmp_path, ROWS[shape], name=f"{shape}.jsonl.gz")
    assert (benchmark.shape, benchmark.name, benchmark.rows) == (shape, shape, 1)
    (question,) = benchmark.questions
    assert question.benchmark == shape
    assert question.messages[0]["role"] == "user"
    assert {s.name for s in SHAPES} == set(ROWS)


def test_what_each_says_to_the_target(tmp_path: Path) -> None:
    asked = {shape: load(tmp_path, row).questions[0] for shape, row in ROWS.items()}
    assert asked["SPEED-Bench"].messages == ({"role": "user", "content": "Write a sort."},)
    assert asked["SPEED-Bench"].follow_ups == ("Make it stable.",)
    assert (asked["SPEED-Bench"].category, asked["MATH-500"].category) == ("coding", "Algebra")
    assert asked["MT-Bench"].follow_ups == ("Shorter.",)
    assert asked["HumanEval"].messages[0]["content"].endswith("```python\ndef f():\n```")
    assert asked["MATH-500"].messages[0]["content"].startswith("What is $1+1$?\n")
    assert asked["MATH-500"].messages[0]["content"].endswith("\\boxed{}.")
    assert asked["GSM8K"].messages[0]["content"] == "Two and two?"


def test_the_other_writing_of_mt_bench(tmp_path: Path) -> None:
    row = {"prompt_id": 1, "category": "math", "prompt": ["One.", "Two."], "reference": []}
    (question,) = load(tmp_path, row).questions
    assert (question.messages[0]["content"], question.follow_ups) == ("One.", ("Two.",))


def test_conversations_are_asked_for_their_last_answer(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you"},
    ]
    benchmark = load(tmp_path, {"messages": messages}, {"messages": messages[:3]})
    assert benchmark.shape == "conversations"
    assert [[m["content"] for m in q.messages] for q in benchmark.questions] == [["Hi", "Hello", "Bye"]] * 2


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(5)]
    benchmark = load(tmp_path, *rows, limit=2)
    assert [q.messages[0]["content"] for q in benchmark.questions] == ["0?", "1?"]
    assert benchmark.rows == 5
    assert benchmark.digest == load(tmp_path, *rows).digest != load(tmp_path, *rows[1:]).digest


def test_an_unknown_shape_names_what_came_and_what_is_understood() -> None:
    with pytest.raises(
        DataError, match=r"Keys found: text, label\. Keys understood: SPEED-Bench: question_id"
    ) as error:
        detect_shape({"text": "x", "label": 1})
    for known in ("MT-Bench", "GSM8K: question, answer", "HumanEval", "MATH-500", "messages"):
        assert known in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no questions"),
        ([ROWS["GSM8K"], {"question": "?"}], "row 2: the first row is of the shape GSM8K, this one has no answer"),
        ([[1, 2]], "row 1: expected an object, came list"),
        ([{**SPEED_BENCH, "turns": "one"}], "expected a list of texts"),
        ([{**SPEED_BENCH, "turns": ["fine", " "]}], "expected a list of texts"),
        (
            [{**SPEED_BENCH, "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}],
            "its text is not in the file.*somewhere",
        ),
        ([{"messages": [{"role": "wizard", "content": "Hi"}]}], "row 1: "),
    ],
)
def test_damaged_rows_are_one_sentence(rows: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, *rows)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question\n')
    with pytest.raises(DataError, match="row 2: expected an object"):
        load_benchmark(tmp_path / "x.jsonl")
