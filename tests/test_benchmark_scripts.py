"""Benchmarks are run by hand, so nothing else notices that what they import has moved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OF_PEERS = {"run_specforge", "run_speculators"}
"""Run in the other trainers' own environments."""
_IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.vllm
@pytest.mark.parametrize("folder", [BENCHMARKS, BENCHMARKS / "trainers"], ids=lambda folder: folder.name)
def test_a_benchmark_finds_all_that_it_imports(folder: Path) -> None:
    names = {file.stem for file in folder.glob("*.py")} - OF_PEERS
    assert len(names) > 5
    command = [sys.executable, "-c", _IMPORT_ALL, *sorted(names)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
