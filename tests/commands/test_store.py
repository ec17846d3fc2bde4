"""The store commands on stores small enough to look at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from eagle3_kimi.cli import app
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.hidden_states.manifest import update_manifest
from eagle3_kimi.hidden_states.store import FeatureFormat, FeatureStore, FeatureStoreWriter
from tests.hidden_states.test_store import MANIFEST, assert_same, make_sample


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, arguments)])


def write(path: Path, names: str, **changes: Any) -> Path:
    with FeatureStoreWriter(path, replace(MANIFEST, **changes), max_shard_bytes=1) as writer:
        for name in names:
            writer.add(make_sample(name, split="validation" if name == "a" else "train"))
    return path


def test_check_of_a_good_store(tmp_path: Path) -> None:
    result = run("check", write(tmp_path / "store", "abc"))
    assert result.exit_code == 0
    assert "3 samples (27 tokens) are good, in 3 shards" in result.output


def test_check_names_every_damage_and_what_to_extract_again(tmp_path: Path) -> None:
    store = write(tmp_path / "store", "abcdef")
    shard = "features-r00-0000{}.safetensors"
    content = bytearray((store / shard.format(0)).read_bytes())
    content[-3] ^= 1
    (store / shard.format(0)).write_bytes(content)
    (store / shard.format(1)).unlink()
    (store / "features-r00-00002.json").write_text('{"shard": "features')
    index = json.loads((store / "features-r00-00003.json").read_text())
    index["samples"][0]["num_tokens"] = 12
    (store / "features-r00-00003.json").write_text(json.dumps(index))
    (store / ".features-r01-00000.safetensors.tmp").write_bytes(b"torn")
    result = run("check", store)
    assert result.exit_code == 1
    assert "2 samples (18 tokens) are good" in result.output
    for number, fault in enumerate(("checksum", "missing", "index", "something else")):
        assert [line for line in result.output.splitlines() if shard.format(number) in line and fault in line], fault
    assert [line.split()[-1] for line in result.output.splitlines() if line.startswith("extract again")] == [*"abcd"]
    assert ".features-r01-00000.safetensors.tmp" in result.output


def test_what_check_asks_for_mends_the_store(tmp_path: Path) -> None:
    store = write(tmp_path / "store", "ab")
    (store / "features-r00-00001.safetensors").unlink()
    assert run("check", store).exit_code == 1
    (store / "features-r00-00001.json").unlink()
    write(store, "b")
    assert run("check", store).exit_code == 0
    assert FeatureStore(store).ids == ["a", "b"]


@pytest.mark.parametrize(
    ("contract", "fault"),
    [(None, "has not run"), ({"passed": False, "agreement": 0.1, "fault": "shifted by one token"}, "shifted by one")],
)
def test_check_of_a_store_without_a_passed_contract(tmp_path: Path, contract: Any, fault: str) -> None:
    result = run("check", write(tmp_path / "store", "a", contract=contract))
    assert result.exit_code == 1
    assert "training refuses this store" in result.output
    assert fault in result.output


def test_info(tmp_path: Path) -> None:
    result = run("info", write(tmp_path / "store", "abc"))
    assert result.exit_code == 0
    lines = {line[:18].strip(): line[18:] for line in result.output.splitlines()}
    assert lines["format"] == "aux fp32, targets state"
    assert lines["samples"] == "2 train, 1 validation"
    assert lines["tokens"] == "27, 9 of them prompt"
    assert lines["contract"] == "passed, agreement 100.0%"
    size = sum(file.stat().st_size for file in (tmp_path / "store").glob("*.safetensors"))
    assert lines["bytes"] == f"{size} ({size / 27:.0f} a token)"


def test_merge_joins_and_leaves_the_sources(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first", "ca"), write(tmp_path / "second", "b")
    update_manifest(second, contract={"passed": True, "agreement": 0.97})
    result = run("merge", first, second, "-o", tmp_path / "merged")
    assert result.exit_code == 0
    assert "3 samples (27 tokens) of 2 stores" in result.output
    merged = FeatureStore(tmp_path / "merged")
    assert merged.ids == ["a", "b", "c"]
    assert merged.manifest.contract == {"passed": True, "agreement": 0.97}  # the weaker one
    assert_same(merged[1], make_sample("b"))
    assert run("check", tmp_path / "merged").exit_code == 0
    assert FeatureStore(first).ids == ["a", "c"]
    write(tmp_path / "merged", "d")  # it goes on like any other
    assert FeatureStore(tmp_path / "merged").ids == [*"abcd"]
    assert run("check", first).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_revision": "r2"}, "target_revision r1 against r2"),
        ({"target": "u", "aux_layer_ids": (1, 2, 4)}, r"target t against u; aux_layer_ids \(1, 2, 3\) against"),
        ({"dtype": "bfloat16"}, "dtype float32 against bfloat16"),
        ({"contract": None}, "no passed contract"),
    ],
)
def test_a_mixed_store_is_not_merged(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    first, second = write(tmp_path / "first", "a"), write(tmp_path / "second", "b", **changes)
    result = run("merge", first, second, "-o", tmp_path / "merged")
    assert isinstance(result.exception, DataError)
    with pytest.raises(DataError, match=message):
        raise result.exception
    assert not (tmp_path / "merged").exists()


def test_a_store_of_another_format_is_not_merged(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first", "a"), tmp_path / "second"
    FeatureStoreWriter(second, replace(MANIFEST, format=FeatureFormat())).close()
    result = run("merge", first, second, "-o", tmp_path / "merged")
    with pytest.raises(DataError, match="format aux fp32, targets state against aux fp8"):
        raise result.exception


def test_merge_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first", "ab"), write(tmp_path / "second", "b")
    for arguments, error, message in (
        ((first, second, "-o", tmp_path / "merged"), DataError, "sample b is in"),
        ((first, "-o", tmp_path / "merged"), UsageError, "at least two"),
        ((first, second, "-o", first), UsageError, "not empty"),
    ):
        with pytest.raises(error, match=message):
            raise run("merge", *arguments).exception
    (second / "features-r00-00000.safetensors").unlink()
    with pytest.raises(DataError, match="missing or torn"):
        raise run("merge", first, second, "-o", tmp_path / "merged").exception
    assert not (tmp_path / "merged").exists()
