"""Progress of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3_kimi.progress import LOG_EVERY_S, Progress


class AuditProgress(Progress):
    """Rows, rate and remaining time. Give it to `run_audit` as `progress`.

    Args:
        files: what is read; their size is the goal, unless one is packed and its real size unknown.
        log_every_s: seconds between log lines where no terminal is attached.
    """

    def __init__(self, files: Sequence[Path], *, log_every_s: float = LOG_EVERY_S) -> None:
        packed = any(file.suffix == ".gz" for file in files)
        self._size = None if packed else sum(file.stat().st_size for file in files)
        super().__init__("audit", total=self._size, log_every_s=log_every_s, log_end=False)

    def __call__(self, rows: int, num_bytes: int) -> None:
        """Takes the rows and bytes read so far."""
        self.show(num_bytes, self.describe(rows, num_bytes))

    def describe(self, rows: int, num_bytes: int) -> str:
        """`1,204,551 rows, 2,410 of 9,870 MB, 55 MB/s, about 136 s left`."""
        rate = num_bytes / self.seconds
        if self._size is None:
            return f"{rows:,} rows, {num_bytes / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s"
        left = max(self._size - num_bytes, 0) / rate if rate else 0.0
        of = f"{num_bytes / 1e6:,.0f} of {self._size / 1e6:,.0f} MB"
        return f"{rows:,} rows, {of}, {rate / 1e6:,.0f} MB/s, about {left:,.0f} s left"
