from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.evaluation.child_process import run_child

SLEEPER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
STARTS_SLEEPER = """
import sys
from pathlib import Path
from eagle3_kimi.evaluation.child_process import run_child
folder = Path(sys.argv[1])
run_child([sys.executable, "-c", sys.argv[2], str(folder / "pid")], log=folder / "log", lock=folder / "lock")
"""


def run(folder: Path, code: str, **options: object) -> None:
    run_child([sys.executable, "-c", code], log=folder / "log", lock=folder / "lock", **options)  # type: ignore[arg-type]


def wait_until(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.is_file() and "State:\tZ" not in status.read_text()


def test_every_line_is_shown_and_kept(tmp_path: Path) -> None:
    shown: list[str] = []
    run(
        tmp_path,
        "import os; print(os.environ['COLOUR']); print('two')",
        environment={"COLOUR": "red"},
        on_line=shown.append,
    )
    assert shown == ["red", "two"]
    assert (tmp_path / "log").read_text() == "red\ntwo\n"


def test_a_failure_is_its_last_error_line(tmp_path: Path) -> None:
    code = "import sys; print('error: first'); print('error: the disk is on fire'); print('noise'); sys.exit(1)"
    with pytest.raises(RunStopped, match=r"^the disk is on fire \(all it said: .*log\)$"):
        run(tmp_path, code)


def test_a_silent_failure_names_its_code(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="ended with code 7 without saying why"):
        run(tmp_path, "import sys; sys.exit(7)")
    with pytest.raises(RunStopped, match="ended with code 137"):  # 128 + SIGKILL
        run(tmp_path, "import os; os.kill(os.getpid(), 9)")


def test_a_program_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="no-such-program could not be started"):
        run_child(["no-such-program"], log=tmp_path / "log", lock=tmp_path / "lock")


def test_children_end_when_their_parent_is_killed_and_the_next_run_waits_for_them(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS_SLEEPER, str(tmp_path), SLEEPER])
    pid_file = tmp_path / "pid"
    wait_until(lambda: pid_file.is_file() and pid_file.read_text())
    child = int(pid_file.read_text())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    run(tmp_path, f"import pathlib; print(pathlib.Path('/proc/{child}').exists())")
    assert (tmp_path / "log").read_text() == "False\n"  # it got the lock only after the first child was gone
    assert not is_running(child)


def test_what_a_child_leaves_behind_is_ended(tmp_path: Path) -> None:
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}, {str(tmp_path / 'pid')!r}])"
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.05)"
    run(tmp_path, f"{leaves}\n{wait}")
    wait_until(lambda: (tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_the_lock_file_may_be_left_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    run(tmp_path, "print('ok')")
    assert os.path.getsize(tmp_path / "log") == 3
