"""Runs one preparation and prints what it took as a JSON line. No dependency: it runs in every environment."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path


def measured(run: Callable[[Path, str, Path, int], dict[str, int]], argv: list[str]) -> None:
    """`argv`: rows, tokenizer folder, output folder, number of processes. CPU seconds include the workers'."""
    rows, tokenizer, output, num_proc = argv[1:5]
    started, cpu = time.perf_counter(), _cpu_seconds()
    made = run(Path(rows), tokenizer, Path(output), int(num_proc))
    taken = {"seconds": time.perf_counter() - started, "cpu_seconds": _cpu_seconds() - cpu}
    print(json.dumps({**made, **taken}))


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
