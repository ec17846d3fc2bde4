from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_case(case: dict[str, Any], check: Callable[[dict[str, Any]], str | None]) -> None:
    difference = check(case)
    if difference is not None:
        pytest.fail(ascii(difference)[1:-1], pytrace=False)
