"""Child processes that never outlive the process that started them, and fail with one sentence.

    parent ──pipe──► guard ──► command, in a process group of its own
                     holds the lock; ends the group when the pipe closes

A parent killed with -9 cannot clean up. Its pipe closes all the same: the guard then ends the command, and
whoever starts the same job again waits for the lock, so two of them never write into one folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3_kimi.errors import RunStopped

ERROR_PREFIX = "error: "
"""Every launched script of this package ends a foreseen failure with such a line."""

_LOOK_EVERY_S = 0.5
_LOCK_TIMEOUT_S = 90.0
_TERMINATE_TIMEOUT_S = 40.0  # torch's elastic agent gives its workers 30 s


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
        lock: held as long as any process of it lives.
        environment: added to this process's own.
        on_line: called with each line of output, soon after it was written.

    Raises:
        RunStopped: it failed; the message is its last `error: ` line, or its exit code, and names the log.
    """
    guard = [sys.executable, "-m", "eagle3_kimi.evaluation.child_process", str(lock), *command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, log.open("r", encoding="utf-8", errors="replace") as lines:
        process = subprocess.Popen(
            guard,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # an interrupt reaches this process alone; closing the pipe ends the child
        )
        assert process.stdin is not None
        last_error = ""
        with process.stdin:
            running = True
            while running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
                    running = False
                for line in lines:
                    last_error = line.removeprefix(ERROR_PREFIX) if line.startswith(ERROR_PREFIX) else last_error
                    if on_line is not None:
                        on_line(line.rstrip())
    if process.returncode:
        ended = last_error.strip() or f"{Path(command[0]).name} ended with code {process.returncode}"
        raise RunStopped(f"{ended} (all it said: {log})")


def main(arguments: list[str]) -> int:
    """The guard: `LOCK COMMAND ...`; ends the command when standard input closes."""
    lock, command = arguments[0], arguments[1:]
    try:
        with FileLock(lock, timeout=_LOCK_TIMEOUT_S):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            threading.Thread(target=_end_with_parent, args=(process,), daemon=True).start()
            code = process.wait()
            _signal_group(process, signal.SIGKILL)  # what it left behind
            return code
    except Timeout:
        sys.stderr.write(f"{ERROR_PREFIX}another run still holds {lock}; wait for it to end\n")
    except OSError as error:
        sys.stderr.write(f"{ERROR_PREFIX}{command[0]} could not be started: {error}\n")
    return 1


def _end_with_parent(process: subprocess.Popen[bytes]) -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the pipe closes; nothing is ever written to it
    _signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TERMINATE_TIMEOUT_S)
    _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
