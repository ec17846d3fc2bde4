"""Progress of a training run: a bar on a terminal, one log line a minute elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from eagle3_kimi.training.metrics import Counts

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0


class TrainProgress:
    """Steps, tokens a second, remaining time, loss and joint acceptance of each step.

    Args:
        total: optimizer steps of the run.
        first: steps that an earlier process did.
        active: whether this rank shows anything.
        log_every_s: seconds between log lines where no terminal is attached.
    """

    def __init__(self, total: int, first: int, *, active: bool, log_every_s: float = _LOG_EVERY_S) -> None:
        self._total, self._first, self._step = total, first, first
        self._active, self._log_every_s = active, log_every_s
        self._bar: Bar | None = None
        self._tokens = 0.0
        self._start = self._logged = time.monotonic()
        self._text = ""

    def __enter__(self) -> TrainProgress:
        self._start = self._logged = time.monotonic()
        if self._active and sys.stderr.isatty():
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=self._total, completed=self._first)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._active and self._text:
            logger.info(self._text)

    def advance(self, step: int, counts: Counts) -> None:
        """The run has come to `step`; `counts` are those of the steps since the last call."""
        self._step, self._tokens = step, self._tokens + counts.tokens
        self._text = self.describe(counts)
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._text)
        elif self._active and now - self._logged >= self._log_every_s:
            self._logged = now
            logger.info(self._text)

    def describe(self, counts: Counts) -> str:
        """`step 120/900, 35,210 tokens/s, about 1,204 s left, loss 2.310, acceptance 0.71 0.52 0.40`."""
        seconds = max(time.monotonic() - self._start, 1e-6)
        left = (self._total - self._step) * seconds / max(self._step - self._first, 1)
        acceptance = " ".join(f"{share:.2f}" for share in counts.total.acceptance)
        return (
            f"step {self._step:,}/{self._total:,}, {self._tokens / seconds:,.0f} tokens/s, about {left:,.0f} s left, "
            f"loss {counts.loss:.3f}, acceptance {acceptance}"
        )
