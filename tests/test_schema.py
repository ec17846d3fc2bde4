from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

import eagle3_kimi
from eagle3_kimi.errors import DataError
from eagle3_kimi.features import CompleteFeatures, build_features, build_quarantine_features
from eagle3_kimi.schema import find_row_faults
from tests.rows import complete_row


def dataset(*rows: dict[str, Any], vocab_size: int | None = 100) -> datasets.Dataset:
    return datasets.Dataset.from_list(list(rows), features=build_features(vocab_size))


@pytest.fixture(autouse=True)
def _quiet_and_uncached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


REASONING, ANSWER = {"kind": "reasoning", "start": 0, "end": 2}, {"kind": "answer", "start": 3, "end": 5}

# Cells that no row may hold, whoever writes them.
BAD_CELLS: list[dict[str, Any]] = [
    {"id": None},
    {"id": " "},
    {"conversation_id": ""},
    {"reasoning": None},
    {"reasoning": ""},
    {"reasoning": " \n\t"},
    {"reasoning": "\u200b\u200d"},
    {"output_token_ids": [5, -1]},
    {"output_token_ids": [5, 100]},
    {"output_token_ids": [5, None]},
    {"output_token_ids": [None]},
    {"prompt_token_ids": [2**40]},
    {"spans": None},
    {"spans": []},
    {"spans": [ANSWER]},
    {"spans": [ANSWER, REASONING]},
    {"spans": [REASONING, REASONING]},
    {"spans": [{**REASONING, "start": 2}]},
    {"spans": [{**REASONING, "start": -1}]},
    {"spans": [{**REASONING, "end": None}]},
    {"spans": [REASONING, {**ANSWER, "start": 1}]},
    {"spans": [{**REASONING, "kind": "thoughts"}]},
]

# Faults that only show when columns are compared.
BAD_ROWS: list[dict[str, Any]] = [
    {"spans": [REASONING, {**ANSWER, "end": 7}]},
    {"output_token_ids": []},
    {"prompt_token_ids": []},
    {"content": " ", "tool_calls": "[]"},
    {"content": None, "tool_calls": None},
    {"num_output_tokens": 5},
    {"num_prompt_tokens": 0},
    {"num_reasoning_tokens": 3},
    {"schema_version": 0},
]


def test_a_complete_row_is_written_and_read_back_unchanged() -> None:
    row = complete_row()
    assert dataset(row)[0] == row
    assert find_row_faults(row) == []
    assert find_row_faults(complete_row(content="", tool_calls='[{"id": "functions.f:0"}]')) == []


@pytest.mark.parametrize("change", BAD_CELLS, ids=json.dumps)
def test_a_bad_cell_is_refused_when_a_table_is_written(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        dataset(complete_row(), complete_row(**change))


@pytest.mark.parametrize("change", BAD_CELLS, ids=json.dumps)
@pytest.mark.parametrize("batched", [False, True])
def test_a_bad_cell_is_refused_by_map(change: dict[str, Any], batched: bool) -> None:
    def spoil(_: Any) -> dict[str, Any]:
        return {name: [value, value] for name, value in change.items()} if batched else change

    written = dataset(complete_row(), complete_row())
    with pytest.raises(DataError):
        written.map(spoil, batched=batched)
    with pytest.raises(DataError):  # the features outlive a first map
        written.map(lambda row: {"source": "x"}).map(spoil, batched=batched)


@pytest.mark.parametrize("change", BAD_CELLS + BAD_ROWS, ids=json.dumps)
def test_a_bad_row_is_refused_when_a_builder_writes_it(change: dict[str, Any]) -> None:
    with pytest.raises(datasets.exceptions.DatasetGenerationError) as caught:
        datasets.Dataset.from_generator(lambda: iter([complete_row(**change)]), features=build_features(100))
    assert isinstance(caught.value.__cause__, DataError)


@pytest.mark.parametrize("change", [c for c in BAD_CELLS + BAD_ROWS if "conversation_id" not in c], ids=json.dumps)
def test_validate_names_split_row_and_field(change: dict[str, Any]) -> None:
    plain = datasets.Features.from_dict(build_features().to_dict())
    if change == {"prompt_token_ids": [2**40]}:
        plain["prompt_token_ids"] = datasets.List(datasets.Value("int64"))
    rows = [complete_row(), complete_row(), complete_row(**change)]
    loaded = datasets.DatasetDict(
        train=datasets.Dataset.from_list([complete_row()], features=plain),
        validation=datasets.Dataset.from_list(rows, features=plain),
    )
    (field,) = list(change)[:1]
    with pytest.raises(DataError, match=rf"split validation .*row 2, field {field}") as caught:
        eagle3_kimi.validate(loaded, vocab_size=100)
    assert "row 0" not in str(caught.value)


def test_validate_counts_rows_and_names_missing_columns() -> None:
    rows = dataset(*(complete_row() for _ in range(5)))
    assert eagle3_kimi.validate(datasets.DatasetDict(train=rows, validation=rows)) == 10
    assert eagle3_kimi.validate(rows.with_format("numpy")) == 5
    with pytest.raises(DataError, match=r"columns \['reasoning'\] are missing"):
        eagle3_kimi.validate(rows.remove_columns("reasoning"))


def test_features_survive_pickling() -> None:
    features = pickle.loads(pickle.dumps(build_features(100)))  # noqa: S301 - `datasets` does, for num_proc
    assert isinstance(features, CompleteFeatures)
    with pytest.raises(DataError):
        features.encode_example(complete_row(reasoning=""))
    with pytest.raises(DataError, match="100"):
        datasets.Dataset.from_list([complete_row(output_token_ids=[100])], features=features)


def test_rows_reload_as_plain_types_where_this_package_is_missing(tmp_path: Path) -> None:
    dataset(complete_row()).save_to_disk(str(tmp_path / "saved"))
    dataset(complete_row()).to_parquet(str(tmp_path / "rows.parquet"))
    script = """
import sys, json
sys.modules["eagle3_kimi"] = None  # an import of it fails
import datasets
datasets.disable_progress_bars()
saved = datasets.load_from_disk(sys.argv[1] + "/saved")
parquet = datasets.Dataset.from_parquet(sys.argv[1] + "/rows.parquet", cache_dir=sys.argv[1] + "/cache")
assert saved.features == parquet.features
assert type(saved.features["reasoning"]) is datasets.Value and type(saved.features["spans"]) is datasets.List
assert saved[0] == parquet[0]
print(json.dumps(saved[0]))
"""
    output = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(output.stdout) == complete_row()


def test_generated_and_reloaded_rows_can_be_joined(tmp_path: Path) -> None:
    written = dataset(complete_row())
    written.save_to_disk(str(tmp_path / "saved"))
    reloaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert len(datasets.concatenate_datasets([written, reloaded])) == 2
    assert len(datasets.concatenate_datasets([reloaded, written])) == 2


def test_the_quarantine_keeps_whatever_was_refused() -> None:
    row = {"id": None, "reason": "token_out_of_range", "text": "", "output_token_ids": [-1, 2**40]}
    features = build_quarantine_features()
    written = datasets.Dataset.from_list([{**dict.fromkeys(features), **row}], features=features)
    assert written[0]["output_token_ids"] == [-1, 2**40]
