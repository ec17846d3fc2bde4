from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from eagle3_kimi.features import build_features, build_quarantine_features
from tests.hub.client import Client
from tests.hub.hub_server import running
from tests.hub.hub_state import Hub
from tests.rows import complete_row

REFUSED = {
    "id": "refused-1", "conversation_id": "conversation-9", "turn": 0, "sample_index": 0, "source": "test",
    "reason": "empty_reasoning", "detail": "", "text": "</think>answer", "prompt_token_ids": [1],
    "output_token_ids": [7, 8, 2], "finish_reason": "stop",
}  # fmt: skip


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        yield hub


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub, tmp_path / "home")


def save_samples(folder: Path, ids: list[str], *, refused: int = 1, **changes: Any) -> Path:
    """A folder as `generate` writes it: the last id is in `validation`."""
    rows = [complete_row(id=name, **changes) for name in ids]
    features = build_features()
    complete = {"train": rows[:-1], "validation": rows[-1:]}
    DatasetDict({name: Dataset.from_list(part, features=features) for name, part in complete.items()}).save_to_disk(
        folder / "complete"
    )
    quarantine = [{**REFUSED, "id": f"refused-{index}"} for index in range(refused)]
    splits = {"train": Dataset.from_list(quarantine, features=build_quarantine_features())} if refused else {}
    DatasetDict(splits).save_to_disk(folder / "quarantine")
    return folder


@pytest.fixture
def samples(tmp_path: Path) -> Callable[..., Path]:
    return lambda name, *ids, **changes: save_samples(tmp_path / name, list(ids), **changes)
