from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest

import eagle3_kimi
from eagle3_kimi.generation.journal import Journal
from eagle3_kimi.tiny.problems import generate_problems

NUM_KILLS = int(os.environ.get("EAGLE3_KIMI_TEST_KILLS", "3"))
"""30 in the nightly run."""
NUM_PROMPTS = 8 * NUM_KILLS
"""So that there is something left to kill."""


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write_prompts(path: Path, count: int, *, seed: int = 5) -> Path:
    """Problems as conversations; a tool problem has a call, its recorded result and an open end."""
    rows = [{"messages": p.messages, "tools": p.tools} for p in generate_problems(count, seed)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class Generated:
    """One finished run with the transformers engine on the tiny target."""

    options: dict[str, Any]
    samples: datasets.DatasetDict
    quarantine: datasets.DatasetDict
    folder: Path

    @property
    def journal(self) -> Path:
        (path,) = Path(self.options["journal_dir"]).glob("*.jsonl")
        return path

    def elsewhere(self, cache: Path, **changes: Any) -> dict[str, Any]:
        """The same run with a cache of its own, so that it is prepared again."""
        return {**self.options, "cache_dir": str(cache), **changes}


def rows_of(samples: datasets.DatasetDict) -> dict[str, list[dict[str, Any]]]:
    return {name: split.to_list() for name, split in samples.items()}


def count_attempts(journal: Path) -> dict[str, int]:
    """Sample id -> how often it was generated, from the journal's own index."""
    key = json.loads(journal.with_suffix(".key.json").read_text())
    return {name: entry.attempts for name, entry in Journal(journal.parent, key).index().items()}


@pytest.fixture(scope="session")
def options(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("builder")
    return {
        "data_files": str(write_prompts(folder / "prompts.jsonl", NUM_PROMPTS)),
        "target": str(tiny_target),
        "engine": "transformers",
        "max_tokens": 128,
        "validation_fraction": 0.3,
        "max_incomplete": 1.0,
        "max_truncated": 1.0,
        "journal_dir": str(folder / "journals"),
        "cache_dir": str(folder / "cache"),
    }


@pytest.fixture(scope="session")
def generated(options: dict[str, Any]) -> Generated:
    samples = eagle3_kimi.load_dataset("kimi_reasoning", **options)
    quarantine = eagle3_kimi.load_dataset("kimi_reasoning", "quarantine", **options)
    return Generated(options, samples, quarantine, Path(options["data_files"]).parent)
