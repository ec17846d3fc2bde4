"""Child processes that never outlive the process that started them, and fail with one sentence.

    parent ──pipe──► guard ──► command, in a process group of its own
                     holds the lock; ends the group when the pipe closes

A parent killed with -9 cannot clean up. Its pipe closes all the same: the guard then ends the command, and
whoever starts the same job again waits for the lock, so two of them never write into one folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from eagle3_kimi.errors import RunStopped

ERROR_PREFIX = "error: "
"""Every launched script of this package ends a foreseen failure with such a line."""

_LOOK_EVERY_S = 0.5
_FULL_BYTES = 1 << 20


def run_child(
    command: Sequence[str],
    *,
    log: Path,
    lock: Path,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Runs `command` to its end.

    Args:
        command: program and arguments.
        log: its output, written anew.
        lock: held as long as the command lives.
        environment: added to this process's own.
        on_line: called with each line of output, soon after it was written.

    Raises:
        RunStopped: it failed; the message is its last `error: ` line, or its exit code, and names the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    last_error = ""
    with log.open("wb") as output, log.open(encoding="utf-8", errors="replace") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle3_kimi.evaluation.guard", str(lock), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # an interrupt reaches this process alone; closing the pipe ends the child
        )
        assert process.stdin is not None
        with process.stdin:
            running = True
            while running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
                    running = False
                for line in lines:
                    if line.startswith(ERROR_PREFIX):
                        last_error = line.removeprefix(ERROR_PREFIX).strip()
                    if on_line is not None:
                        on_line(line.rstrip())
    if process.returncode:
        raise RunStopped(f"{last_error or _guess_reason(command, log, process.returncode)} (all it said: {log})")


def _guess_reason(command: Sequence[str], log: Path, code: int) -> str:
    if shutil.disk_usage(log.parent).free < _FULL_BYTES:
        return f"the disk that holds {log.parent} is full"
    return f"{Path(command[0]).name} {' '.join(command[1:3])} ended with code {code} without saying why"
