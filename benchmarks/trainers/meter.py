"""What a training loop takes, measured inside its process. No dependency but the standard library: it runs in every
environment.

Figures begin when imports and models are loaded. Speed leaves out the first steps (warm-up, compilation), memory does
not. Memory is resident memory (what `top` shows) and, of it, what is anonymous: a file that is read through a memory
map is resident while the machine has room for it, and costs nothing when it has not.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 5
_SAMPLE_EVERY_S = 0.02
_STATUS = Path("/proc/self/status")


class Meter:
    """Counts steps, tokens, time and memory of one training loop in this process."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self._tokens_before = 0
        self._stopped = threading.Event()

    def start(self) -> None:
        """The loop begins: everything is loaded."""
        self._before = read_memory()
        self._anonymous_peak = self._before["RssAnon"]
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._mark()

    def step(self, tokens: int) -> None:
        """An optimizer step over `tokens` tokens of samples, prompts included and padding not, has ended."""
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        if self.steps == WARM_UP_STEPS:
            self._mark()

    def finish(self) -> dict[str, Any]:
        """The loop has ended; its figures."""
        seconds, cpu = time.perf_counter() - self._clock, time.process_time() - self._cpu
        self._stopped.set()
        self._thread.join()
        tokens, peak = self.tokens - self._tokens_before, read_memory()["VmHWM"]
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_second": tokens / seconds,
            "tokens_per_cpu_second": tokens / cpu,
            "cpu_seconds": cpu,
            "peak_mb": peak,
            "peak_above_load_mb": peak - self._before["VmRSS"],
            "anonymous_above_load_mb": self._anonymous_peak - self._before["RssAnon"],
        }

    def save(self, file: Path) -> None:
        """`finish`, into a JSON file."""
        file.write_text(json.dumps(self.finish()))

    def _mark(self) -> None:
        self._clock, self._cpu, self._tokens_before = time.perf_counter(), time.process_time(), self.tokens

    def _watch(self) -> None:
        while not self._stopped.wait(_SAMPLE_EVERY_S):
            self._anonymous_peak = max(self._anonymous_peak, read_memory()["RssAnon"])


def read_memory() -> dict[str, float]:
    """Name -> MB of this process's memory (Linux)."""
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
