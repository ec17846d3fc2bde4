"""How far a long run is: a bar on a terminal, one log line a minute elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


class Progress:
    """What every kind of run shares; each describes itself.

    Args:
        title: stands before the bar and the log lines.
        total: the goal; None while it is not known.
        completed: done by an earlier process.
        active: whether this process shows anything.
        log_every_s: seconds between log lines where no terminal is attached.
        log_end: logs the last line once more when the run ends.
    """

    def __init__(
        self,
        title: str,
        *,
        total: float | None = None,
        completed: float = 0,
        active: bool = True,
        log_every_s: float = LOG_EVERY_S,
        log_end: bool = True,
    ) -> None:
        self._title, self._total, self._completed = title, total, completed
        self._active, self._log_every_s, self._log_end = active, log_every_s, log_end
        self._bar: Bar | None = None
        self._text = ""
        self._start = self._logged = time.monotonic()

    def __enter__(self) -> Self:
        self._start = self._logged = time.monotonic()
        if self._active and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn(self._title), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=self._total, completed=int(self._completed))
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._active and self._log_end and self._text:
            logger.info("%s: %s", self._title, self._text)

    @property
    def seconds(self) -> float:
        """Since the run began; never 0."""
        return max(time.monotonic() - self._start, 1e-6)

    def show(self, completed: float, text: str, *, total: float | None = None) -> None:
        """The run has come to `completed`."""
        self._text = text
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, total=total or self._total, description=text)
        elif self._active and now - self._logged >= self._log_every_s:
            self._logged = now
            logger.info("%s: %s", self._title, text)
