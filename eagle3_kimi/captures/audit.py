"""Reads files of captured responses in a stream: counts, diagnosis, repaired and refused rows.

    files -> blocks of lines -> worker processes judge blocks -> one tally, in file order -> --out, --quarantine

Memory is flat: a few blocks are in flight, and a row leaves 8 bytes behind, by which duplicates are found.
"""

from __future__ import annotations

import glob
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_kimi.captures.context import CaptureContext
from eagle3_kimi.captures.diagnosis import diagnose
from eagle3_kimi.captures.identity import IdentitySet
from eagle3_kimi.captures.lines import Block, read_blocks
from eagle3_kimi.captures.records import RowSummary, duplicate_record, summarise_block
from eagle3_kimi.captures.verdicts import Code, Repair, Verdict
from eagle3_kimi.errors import UsageError

_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz", ".sse", ".txt")
_PARALLEL_FROM = 8 << 20
"""Bytes: smaller inputs are judged here, before a worker would have started."""
_EXAMPLES = 2


@dataclass(kw_only=True)
class AuditReport:
    """What an audit found. Responses are choices; a row may hold several."""

    files: list[str]
    min_complete: float
    rows: int = 0
    bytes: int = 0
    """Uncompressed."""
    seconds: float = 0.0
    formats: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    reasons: Counter[Code] = field(default_factory=Counter)
    token_exact: int = 0
    """Complete responses whose token ids are there; the others' text would have to be tokenised again."""
    duplicates: int = 0
    superseded: int = 0
    """Refused rows whose request is complete in another row (a retry)."""
    torn_tails: int = 0
    examples: dict[Code, list[str]] = field(default_factory=dict)
    """Two places and details for each reason that is not `ok`."""
    out: str | None = None
    quarantine: str | None = None

    @property
    def responses(self) -> int:
        """Duplicates and superseded rows left out."""
        return self.verdicts.total() - self.superseded

    @property
    def complete(self) -> int:
        return self.verdicts[Verdict.ACCEPT] + self.verdicts[Verdict.REPAIR]

    @property
    def complete_share(self) -> float:
        return self.complete / self.responses if self.responses else 0.0

    @property
    def passed(self) -> bool:
        return self.responses > 0 and self.complete_share >= self.min_complete

    @property
    def diagnosis(self) -> list[str]:
        """The systematic faults, one sentence each."""
        reasons: dict[Code, int] = {**self.reasons}
        if self.duplicates:
            reasons[Repair.DUPLICATE_DROPPED] = self.duplicates
        return diagnose(reasons, self.verdicts.total())


def run_audit(
    paths: list[str],
    out: Path | None = None,
    quarantine: Path | None = None,
    min_complete: float = 1.0,
    *,
    context: CaptureContext | Mapping[str, Any] | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Audits captured responses.

    Args:
        paths: files, folders or glob patterns.
        out: where complete rows (accepted and repaired) go as JSONL, written when the audit ends.
        quarantine: where refused rows and duplicates go, with the reason and the record as it was.
        min_complete: share of complete responses below which `AuditReport.passed` is false.
        context: what is known about the requests.
        processes: workers; by default two where there are two cores and 8 MB or more to read.
        progress: called with rows and bytes read so far.

    Raises:
        UsageError: no such file, a share outside 0..1, an output that is an input.
    """
    if not 0 <= min_complete <= 1:
        raise UsageError(f"--min-complete: expected a share from 0 to 1, came {min_complete}")
    files = find_files(paths)
    _check_outputs(files, out, quarantine)
    known = CaptureContext.of(context)
    started = time.monotonic()
    report = AuditReport(files=[str(file) for file in files], min_complete=min_complete)
    tally = _Tally(report, out, quarantine)
    try:
        for file, block, rows in _judge_files(files, known, _count_processes(files, known, processes), tally.writes):
            tally.add(str(file), block, rows)
            if progress is not None:
                progress(report.rows, report.bytes)
        tally.finish()
    finally:
        tally.close()
    report.seconds = time.monotonic() - started
    return report


def find_files(paths: list[str]) -> list[Path]:
    """The files that `paths` name: files, folders (their JSON files), glob patterns. In order, once each."""
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(name)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(_SUFFIXES))
        else:
            matches = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(name, recursive=True))]
        matches = [match for match in matches if not match.is_dir()]
        if not matches:
            raise UsageError(f"{name}: no file of that name, pattern or folder; audit reads JSON, JSONL and their gzip")
        found |= dict.fromkeys(matches)
    if not found:
        raise UsageError("audit wants at least one file, folder or pattern")
    return list(found)


def _check_outputs(files: list[Path], out: Path | None, quarantine: Path | None) -> None:
    inputs = {file.resolve() for file in files}
    targets = [path.resolve() for path in (out, quarantine) if path is not None]
    for path in targets:
        if path in inputs or path.is_dir():
            raise UsageError(f"{path}: --out and --quarantine want new files, not a folder and not an input")
    if len(set(targets)) < len(targets):
        raise UsageError(f"--out and --quarantine are the same file: {targets[0]}")


def _count_processes(files: list[Path], context: CaptureContext, processes: int | None) -> int:
    if context.protocol is not None:  # a tokenizer is not handed to other processes
        return 1
    if processes is not None:
        return max(1, processes)
    size = sum(file.stat().st_size for file in files)
    return min(2, os.cpu_count() or 1) if size >= _PARALLEL_FROM else 1


def _judge_files(
    files: list[Path], context: CaptureContext, processes: int, keep: bool
) -> Iterator[tuple[Path, Block, list[RowSummary]]]:
    """Judged blocks in file order."""
    blocks = ((file, block) for file in files for block in read_blocks(file))
    judge = partial(summarise_block, context=context, keep=keep)
    if processes == 1:
        for file, block in blocks:
            yield file, block, judge(block, file=str(file))
        return
    with ProcessPoolExecutor(processes) as pool:
        waiting: deque[tuple[Path, Block, Any]] = deque()
        for file, block in blocks:
            waiting.append((file, block, pool.submit(judge, block, file=str(file))))
            if len(waiting) > 2 * processes:  # bounds what is in memory
                file, block, future = waiting.popleft()
                yield file, block, future.result()
        for file, block, future in waiting:
            yield file, block, future.result()


class _Tally:
    """Counts judged rows in order, tells duplicates, and writes rows out."""

    def __init__(self, report: AuditReport, out: Path | None, quarantine: Path | None) -> None:
        self.report = report
        self._kept, self._refused = IdentitySet(), IdentitySet()
        self._out = _AtomicFile(out) if out else None
        self._quarantine = _AtomicFile(quarantine) if quarantine else None
        self.writes = out is not None or quarantine is not None

    def add(self, file: str, block: Block, rows: list[RowSummary]) -> None:
        report = self.report
        report.bytes += len(block.data)
        identities = np.array([row.identity for row in rows], dtype=np.uint64)
        kept_before, refused_before = self._kept.contains(identities), self._refused.contains(identities)
        kept: set[int] = set()
        refused: set[int] = set()
        lines = block.data.split(b"\n") if self._quarantine else []
        for row, was_kept, was_refused in zip(rows, kept_before, refused_before, strict=True):
            report.rows += 1
            if row.torn:
                report.torn_tails += 1
                self._count(file, row)
            elif was_kept or row.identity in kept:
                report.duplicates += 1
                if self._quarantine:
                    self._quarantine.write(duplicate_record(file, row.line, lines[row.line - block.first_line]))
            else:
                if row.complete and (was_refused or row.identity in refused):
                    report.superseded += 1
                    refused.discard(row.identity)
                (kept if row.complete else refused).add(row.identity)
                self._count(file, row)
        self._kept.add(list(kept))
        self._refused.add(list(refused))

    def _count(self, file: str, row: RowSummary) -> None:
        report = self.report
        for choice in row.choices:
            report.formats[choice.format] += 1
            report.verdicts[choice.verdict] += 1
            report.reasons[choice.reason] += 1
            report.token_exact += choice.token_exact
            if choice.detail and len(report.examples.setdefault(choice.reason, [])) < _EXAMPLES:
                report.examples[choice.reason].append(f"{file}:{row.line}: {choice.detail}")
        if self._out:
            self._out.write(row.kept_records)
        if self._quarantine:
            self._quarantine.write(row.refused_records)

    def finish(self) -> None:
        """Gives the outputs their names, now that they are whole."""
        report = self.report
        if self._out:
            report.out = str(self._out.commit())
        if self._quarantine:
            report.quarantine = str(self._quarantine.commit())

    def close(self) -> None:
        for target in (self._out, self._quarantine):
            if target is not None:
                target.discard()


class _AtomicFile:
    """Written under a temporary name beside the final one; the old file stays until the new one is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = self._temporary.open("wb")

    def write(self, data: bytes) -> None:
        self._handle.write(data)

    def commit(self) -> Path:
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        os.replace(self._temporary, self.path)
        return self.path

    def discard(self) -> None:
        self._handle.close()
        self._temporary.unlink(missing_ok=True)
