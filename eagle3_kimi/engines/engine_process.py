"""The main module of vLLM's processes: it ends them when the process that started them is gone.

vLLM's engine core runs in a process of its own, which outlives a parent that is killed, and keeps the memory.
A spawned process first runs its parent's main module under the name `__mp_main__`. While an engine starts, that
is this module. So the person's script is not run a second time either, and needs no `if __name__ == "__main__"`:
without it, the second run would wait for the locks of the first, and the first for the second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spawned_from_here() -> Iterator[None]:
    """Processes spawned meanwhile, and theirs in turn, run this module first."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules[__name__]
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with_parent() -> None:
    while (parent := multiprocessing.parent_process()) is None:  # known shortly after this module has run
        time.sleep(0.05)
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__mp_main__":
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
