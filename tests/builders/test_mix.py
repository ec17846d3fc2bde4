from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

import eagle3_kimi  # noqa: F401 - registers the builder
from tests.tiny_folder import write_tiny_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("target")))


def write_mix(folder: Path, *prompts: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "mix.yaml").write_text("sources:\n  - {name: rows, files: [rows.jsonl], count: 9}\n")
    return str(folder / "mix.yaml")


def config_id(mix: str, target: str, cache_dir: Path) -> str:
    builder = datasets.load_dataset_builder(
        "kimi_reasoning", data_files=mix, target=target, engine="transformers", cache_dir=str(cache_dir)
    )
    return str(builder.config_id)


def test_the_cache_entry_of_a_mix_follows_what_its_files_hold(tmp_path: Path, target: str) -> None:
    first = config_id(write_mix(tmp_path / "a", "Name a colour."), target, tmp_path)
    assert config_id(write_mix(tmp_path / "b", "Name a colour."), target, tmp_path) == first
    assert config_id(write_mix(tmp_path / "b", "Name a bird."), target, tmp_path) != first
