"""One case of the kinds whose input says which function it concerns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_kimi.errors import Eagle3KimiError

Came = dict[str, Any]
Run = Callable[[Came, Came], None]


def check_case(case: dict[str, Any], runs: Sequence[tuple[set[str], Run]]) -> str | None:
    """None when the case passes, else one line that says what differs. Reason names are not compared.

    Args:
        case: with `input` and `expect`.
        runs: keys of an input -> what fills in what came of it, or raises an error of ours.
    """
    given, expect = case["input"], case["expect"]
    run = next((run for keys, run in runs if keys <= given.keys()), None)
    if run is None:
        return f"no check takes an input with the keys {sorted(given)}"
    came: Came = {"verdict": "accept"}
    try:
        run(given, came)
        why = ""
    except Eagle3KimiError as error:
        came["verdict"], why = "reject", str(error)
    for name, value in came.items():
        if name in expect and not _same(value, expect[name]):
            return f"{name}: expected {expect[name]!r} ({expect.get('reason')}), came {value!r} {why}"
    return None


def _same(value: Any, wanted: Any) -> bool:
    return math.isclose(value, wanted, rel_tol=1e-6) if isinstance(wanted, float) else bool(value == wanted)
