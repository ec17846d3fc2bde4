from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_kimi.target import Target
from eagle3_kimi.training.trainer import train_drafter
from tests.training.runs import build_config
from tests.training.toy import write_toy_run


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """A toy target and a feature store of it."""
    return write_toy_run(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def reference(toy: tuple[Target, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    output = tmp_path_factory.mktemp("runs") / "reference"
    train_drafter(build_config(toy, output))
    return output
