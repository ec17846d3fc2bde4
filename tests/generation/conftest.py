from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.generation.scripted import Bench


@pytest.fixture
def bench(tmp_path: Path, tiny_tokenizer: Any) -> Bench:
    return Bench(tmp_path, tiny_tokenizer)
