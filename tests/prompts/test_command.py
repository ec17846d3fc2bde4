from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3_kimi.cli import app
from eagle3_kimi.errors import UsageError
from eagle3_kimi.prompts.mix import EvaluationSet, parse_evaluation_sets
from eagle3_kimi.prompts.verdicts import Refusal

DATA_PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SECRET = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    prompts = ["Name a colour.", "Name a bird. " * 30, f"Please count: {SECRET}.", " "]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (tmp_path / "secret.jsonl").write_text(json.dumps({"question": SECRET}))
    path = tmp_path / "mix.yaml"
    path.write_text("sources:\n  - {name: rows, files: [rows.jsonl], count: 4}\n")
    return path


def test_the_command_writes_the_artefact_and_prints_the_report(mix: Path, tmp_path: Path, tiny_folder: Path) -> None:
    arguments = ["prompts", str(mix), "-o", str(tmp_path / "out"), "--seed", "5", "--target", str(tiny_folder)]
    arguments += ["--max-prompt-tokens", "100", "--evaluation-set", f"own={tmp_path / 'secret.jsonl'}"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in ("1 conversations", "too_long", "overlaps_evaluation_set", "empty_user_turn", "rows.jsonl, row 4"):
        assert text in result.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["seed"], report["rows"], report["length_unit"]) == (5, 1, "tokens")
    assert report["leaked"] == {"own": 1}
    assert (tmp_path / "out" / "report.html").is_file()


def test_evaluation_sets_are_named() -> None:
    assert parse_evaluation_sets(["a=x.jsonl", "b=y=z.jsonl", "a=w.jsonl"]) == (
        EvaluationSet(name="a", files=("x.jsonl", "w.jsonl")),
        EvaluationSet(name="b", files=("y=z.jsonl",)),
    )
    for text in ("x.jsonl", "=x.jsonl", "gsm8k="):
        with pytest.raises(UsageError, match="NAME=FILE"):
            parse_evaluation_sets([text])


def test_the_data_page_explains_every_reason() -> None:
    table = DATA_PAGE.read_text(encoding="utf-8").split("## What is refused")[1].split("## ")[0]
    assert [reason for reason in Refusal if f"`{reason}`" not in table] == []
