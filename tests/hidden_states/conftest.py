from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_kimi.target import Target
from tests.hidden_states.random_target import generate_rows, save_random_target, save_rows


@pytest.fixture(scope="session")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_random_target(tmp_path_factory.mktemp("target") / "random", seed=0)


@pytest.fixture(scope="session")
def greedy_rows(random_target: Target) -> list[dict]:
    return generate_rows(random_target, 14, temperature=0.0)


@pytest.fixture(scope="session")
def greedy_dataset(greedy_rows: list[dict], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_rows(greedy_rows, tmp_path_factory.mktemp("samples") / "greedy")
