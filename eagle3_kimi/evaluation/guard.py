"""Runs one command and ends it when its parent is gone: `python -m eagle3_kimi.evaluation.guard LOCK COMMAND ...`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

from filelock import FileLock, Timeout

from eagle3_kimi.evaluation.child_process import ERROR_PREFIX

_LOCK_TIMEOUT_S = 90.0
_TERMINATE_TIMEOUT_S = 40.0  # torch's elastic agent gives its workers 30 s


def main(arguments: list[str]) -> int:
    """Waits for the lock, runs the command, and gives its exit code; standard input is the pipe to the parent."""
    lock, command = arguments[0], arguments[1:]
    try:
        with FileLock(lock, timeout=_LOCK_TIMEOUT_S):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            threading.Thread(target=_end_with_parent, args=(process,), daemon=True).start()
            code = process.wait()
            _signal_group(process, signal.SIGKILL)  # what it left behind
            return code if code >= 0 else 128 - code
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
