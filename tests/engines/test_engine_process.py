"""Processes that an engine starts end with the process that started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from eagle3_kimi.engines.engine_process import spawned_from_here

_SCRIPT = """
import multiprocessing, time
from eagle3_kimi.engines.engine_process import spawned_from_here
with spawned_from_here():
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(120,))
    child.start()
print(child.pid, flush=True)
time.sleep(120)
"""
"""No `if __name__ == "__main__"`: run a second time by the child, it would fail."""


def test_a_child_of_an_unguarded_script_starts_and_ends_with_its_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(_SCRIPT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        assert child.is_running()
        process.kill()
    _, left = psutil.wait_procs([child], timeout=30)
    assert left == []


def test_the_main_module_is_put_back() -> None:
    main = sys.modules["__main__"]
    with spawned_from_here():
        assert sys.modules["__main__"].__spec__.name == "eagle3_kimi.engines.engine_process"  # type: ignore[union-attr]
    assert sys.modules["__main__"] is main
