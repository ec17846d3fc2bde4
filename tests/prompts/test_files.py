from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts.files import RefusedRow, load_conversations, read_rows
from eagle3_kimi.prompts.verdicts import Refusal

ROWS = [{"prompt": "Go."}, {"prompt": "Stop.\nNow."}, {"prompt": "两只猫"}]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def write_rows(folder: Path, suffix: str) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif suffix == ".csv":
        path.write_text('prompt\nGo.\n"Stop.\nNow."\n两只猫\n', encoding="utf-8")
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    else:
        write_lines(path, ROWS)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv"])
def test_every_kind_of_file_gives_the_same_conversations(tmp_path: Path, suffix: str) -> None:
    conversations = list(load_conversations([write_rows(tmp_path, suffix)]))
    assert [c.prompt_text for c in conversations] == ["Go.", "Stop.\nNow.", "两只猫"]
    assert {c.source for c in conversations} == {"rows"}
    assert len({c.id for c in conversations}) == 3


def test_refused_rows_are_counted_with_file_row_and_field(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", [{"prompt": "Go."}, "{", {"prompt": 3}, {"prompt": "Go."}, {"text": ""}])
    refused: list[RefusedRow] = []
    assert len(list(load_conversations([file], on_refused=refused.append))) == 1
    assert [(row.row, row.reason) for row in refused] == [
        (2, Refusal.INVALID_JSON),
        (3, Refusal.CONTENT_NOT_TEXT),
        (4, Refusal.DUPLICATE),
        (5, Refusal.UNKNOWN_SHAPE),
    ]
    assert str(refused[1]) == f"{file}, row 3: content_not_text (prompt: expected text, came int)"


def test_a_refused_row_stops_the_run_where_nobody_counts(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", [{"prompt": "Go."}, {"prompt": " "}])
    with pytest.raises(DataError, match=r"x\.jsonl, row 2: empty_user_turn"):
        list(load_conversations([file], skip_bad_files=True))


def test_a_file_of_unknown_shape_names_the_keys(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", [{"text": "Go.", "label": 1}])
    with pytest.raises(DataError, match=r"keys found: text, label; keys understood: messages"):
        list(load_conversations([file], on_refused=print))


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.parquet", "x.json"])
def test_a_damaged_file_stops_the_run_or_is_skipped(tmp_path: Path, name: str) -> None:
    damaged = tmp_path / name
    damaged.write_bytes(b"[not what its name says")
    good = write_rows(tmp_path, ".jsonl")
    with pytest.raises(DataError, match=name):
        list(load_conversations([damaged, good]))
    with pytest.warns(UserWarning, match=name):
        assert len(list(load_conversations([damaged, good], skip_bad_files=True))) == 3


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        list(read_rows(tmp_path / "x.jsonl"))
    (tmp_path / "x.txt").write_text("Go.")
    with pytest.raises(UsageError, match=r"expected one of \.jsonl"):
        list(read_rows(tmp_path / "x.txt"))


def test_an_artefact_reads_back_as_it_was(tmp_path: Path) -> None:
    first = list(load_conversations([write_rows(tmp_path, ".jsonl")]))
    again = load_conversations([write_lines(tmp_path / "again.jsonl", [c.as_row() for c in first])])
    assert list(again) == first
