from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_kimi.prompts.lengths import TokenCounter
from eagle3_kimi.target import resolve_target
from tests.tiny_folder import write_tiny_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def count_tokens(tiny_folder: Path) -> TokenCounter:
    return TokenCounter(resolve_target(tiny_folder))
