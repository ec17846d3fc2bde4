"""Rows of local files, and conversations of a prompts artefact. Streams; memory is flat."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts.conversations import Conversation, Reading, normalise_row
from eagle3_kimi.prompts.verdicts import Refusal

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".json.gz", ".parquet", ".csv")


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that is not kept: where it stands and why."""

    file: str
    row: int
    """Counted from 1; the line, in a JSONL file."""
    reason: Refusal
    detail: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason} ({self.detail})"


class RefusedRows:
    """Counts refused rows by reason and keeps the first of each reason. Give it as `on_refused`."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self.first: dict[str, RefusedRow] = {}

    def __call__(self, row: RefusedRow) -> None:
        self.by_reason[str(row.reason)] += 1
        self.first.setdefault(str(row.reason), row)

    def __str__(self) -> str:
        """One line for the number, one for each reason with its first row."""
        lines = [f"{self.by_reason.total()} rows of prompts are refused"]
        for reason, count in self.by_reason.most_common():
            row = self.first[reason]
            lines.append(f"  {count} {reason}: {row.file}, row {row.row}: {row.detail}")
        return "\n".join(lines)


def load_conversations(
    data_files: Iterable[str | Path],
    *,
    reading: Reading | None = None,
    source: str | None = None,
    skip_bad_files: bool = False,
    on_refused: Callable[[RefusedRow], None] | None = None,
) -> Iterator[Conversation]:
    """Conversations of files in any understood shape, in order.

    Args:
        data_files: JSONL (also gzipped), JSON, Parquet or CSV files.
        source: the source's name; the file's stem where None and the row names none.
        skip_bad_files: go on with the next file when one cannot be read.
        on_refused: called with each refused row. Without it, the first refused row stops the run.

    Raises:
        UsageError: a file does not exist, or its kind is not known.
        DataError: a file is damaged or of unknown shape; a row is refused and nobody listens; or nothing is left.
    """
    files, seen, refused = [Path(file) for file in data_files], set[str](), RefusedRows()

    def note(row: RefusedRow) -> None:
        if on_refused is None:
            raise _RefusedRowError(str(row))
        refused(row)
        on_refused(row)

    for file in files:
        try:
            yield from _load_file(file, reading, source, seen, note)
        except DataError as error:
            if not skip_bad_files or isinstance(error, _RefusedRowError):
                raise
            warnings.warn(f"the rest of a bad file is skipped: {error}", stacklevel=2)
    if not seen:
        raise DataError(f"no conversation in {', '.join(map(str, files)) or 'no files'}; {refused}")


class _RefusedRowError(DataError):
    """A refused row that nobody counts: not a fault of the file as a whole."""


def _load_file(
    file: Path,
    reading: Reading | None,
    source: str | None,
    seen: set[str],
    note: Callable[[RefusedRow], None],
) -> Iterator[Conversation]:
    name = source or file.name.split(".")[0]
    for number, row in enumerate(read_rows(file), start=1):
        if isinstance(row, BadJson):
            refused = RefusedRow(str(file), number, Refusal.INVALID_JSON, row.message)
        else:
            normalised = normalise_row(row, reading, source=name)
            conversation = normalised.conversation
            if conversation is not None and conversation.id not in seen:
                seen.add(conversation.id)
                yield replace(conversation, source=source or conversation.source)
                continue
            if conversation is not None:
                detail = f"the id {conversation.id} was seen before"
                refused = RefusedRow(str(file), number, Refusal.DUPLICATE, detail)
            else:
                assert normalised.refusal is not None
                refused = RefusedRow(str(file), number, normalised.refusal, normalised.detail)
        if refused.reason is Refusal.UNKNOWN_SHAPE and number == 1:
            raise DataError(f"{file}: the shape of its rows is not understood. {refused.detail}")
        note(refused)


@dataclass(frozen=True, slots=True)
class BadJson:
    """Stands for a line that is not JSON."""

    message: str


def read_rows(file: Path) -> Iterator[Any]:
    """Rows of one file, as they stand: no merging of columns, so no nulls that the file does not have.

    Raises:
        UsageError: no such file, or an unknown kind.
        DataError: the file is damaged.
    """
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    name = file.name.lower().removesuffix(".gz")
    try:
        if name.endswith((".jsonl", ".ndjson")):
            yield from _read_json_lines(file)
        elif name.endswith(".json"):
            yield from _read_json(file)
        elif name.endswith(".parquet"):
            yield from _read_parquet(file)
        elif name.endswith(".csv"):
            csv.field_size_limit(1 << 30)  # a prompt may be longer than the module's 128 KiB
            with _open_text(file, newline="") as handle:
                yield from csv.DictReader(handle)
        else:
            raise UsageError(f"{file}: expected one of {' '.join(SUFFIXES)}")
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _open_text(file: Path, newline: str = "\n") -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig", newline=newline)
    return file.open(encoding="utf-8-sig", newline=newline)


def _read_json_lines(file: Path) -> Iterator[Any]:
    with _open_text(file) as handle:
        for line in handle:
            if line.strip():
                yield _loads(line)


def _loads(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadJson(str(error))


def _read_json(file: Path) -> Iterator[Any]:
    """One JSON list of rows, or JSONL under another name."""
    with _open_text(file) as handle:
        first = handle.read(64).lstrip()
    if not first.startswith("["):
        yield from _read_json_lines(file)
        return
    with _open_text(file) as handle:
        rows = _loads(handle.read())
    if isinstance(rows, BadJson):
        raise DataError(f"{file} is not JSON: {rows.message}")
    yield from rows


def _read_parquet(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
