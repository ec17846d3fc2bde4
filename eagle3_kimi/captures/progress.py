"""Progress of an audit: a bar on a terminal, one log line a minute elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


class AuditProgress:
    """Rows, rate and remaining time. Give it to `run_audit` as `progress`.

    Args:
        files: what is read; their size is the goal, unless one is packed and its real size unknown.
        log_every_s: seconds between log lines where no terminal is attached.
    """

    def __init__(self, files: Sequence[Path], *, log_every_s: float = LOG_EVERY_S) -> None:
        packed = any(file.suffix == ".gz" for file in files)
        self._total = None if packed else sum(file.stat().st_size for file in files)
        self._log_every_s = log_every_s
        self._bar: Progress | None = None
        self._start = self._logged = time.monotonic()

    def __enter__(self) -> AuditProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("audit"), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, rows: int, num_bytes: int) -> None:
        """Takes the rows and bytes read so far."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=num_bytes, description=self.describe(rows, num_bytes))
        elif now - self._logged >= self._log_every_s:
            self._logged = now
            logger.info("audit: %s", self.describe(rows, num_bytes))

    def describe(self, rows: int, num_bytes: int) -> str:
        """`1,204,551 rows, 2,410 of 9,870 MB, 55 MB/s, about 136 s left`."""
        rate = num_bytes / max(time.monotonic() - self._start, 1e-6)
        if self._total is None:
            return f"{rows:,} rows, {num_bytes / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s"
        left = max(self._total - num_bytes, 0) / rate if rate else 0.0
        of = f"{num_bytes / 1e6:,.0f} of {self._total / 1e6:,.0f} MB"
        return f"{rows:,} rows, {of}, {rate / 1e6:,.0f} MB/s, about {left:,.0f} s left"
