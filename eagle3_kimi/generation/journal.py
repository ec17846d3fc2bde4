"""Append-only record of finished samples: what is written is never generated again.

One line a sample, `CRC32 JSON`, flushed to the kernel as it finishes, so kill -9 loses at most the line
being written. A torn last line is cut off when the journal is opened; a damaged line elsewhere stops
the run, since something else than a crash wrote it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
from filelock import FileLock, Timeout

from eagle3_kimi.errors import DataError, RunStopped

Record = dict[str, Any]
"""`id`, `reason` ("ok" or why refused), and `row`: the columns of its table."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Where the last record of a sample stands, in bytes from the start, its reason, and how many there are."""

    offset: int
    reason: str
    attempts: int = 1


def default_journal_dir() -> Path:
    """`$EAGLE3_KIMI_CACHE` or the user's cache folder."""
    from eagle3_kimi.tiny import cache_dir

    return cache_dir() / "journals"


class Journal:
    """The journal of one generation fingerprint.

    Use as a context manager to append; reading needs no lock.

    Args:
        directory: where journals live.
        key: `config.journal_key`; its fingerprint names the file, and the key is written beside it.
    """

    def __init__(self, directory: Path, key: dict[str, Any]) -> None:
        from eagle3_kimi.generation.config import fingerprint

        self.path = directory / f"{fingerprint(key)}.jsonl"
        self._key = key
        self._lock = FileLock(str(self.path) + ".lock")
        self._file: IO[bytes] | None = None
        self._reader: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self.path.with_suffix(".key.json").write_text(json.dumps(self._key, indent=1, sort_keys=True) + "\n")
            self._cut_torn_tail()
            # Unbuffered: what could not be written must not be waiting when the file is closed.
            self._file = self.path.open("ab", buffering=0)
        except Timeout:
            raise RunStopped(
                f"another run is writing the journal {self.path}; wait for it to end, or give --journal-dir"
            ) from None
        except OSError as error:
            self._lock.release()
            raise RunStopped(f"cannot open the journal {self.path}: {error.strerror}") from error
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Journal, (self.path.parent, self._key)

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
            self._file = None
            self._lock.release()

    def append(self, record: Record) -> int:
        """Writes one finished sample and hands it to the kernel; where it stands, as in the index.

        Raises:
            RunStopped: the disk is full; the journal is cut back to its last whole record.
        """
        assert self._file is not None, "append needs the journal opened with `with`"
        line = memoryview(encode_record(record))
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            os.truncate(self.path, end)
            raise RunStopped(
                f"cannot write the journal {self.path}: {error.strerror}. What it holds is kept."
            ) from error
        return end

    def index(self) -> dict[str, JournalEntry]:
        """Sample id -> where its record stands and its reason; the last record of an id counts.

        Every checksum is verified; records themselves are not kept (flat memory).
        """
        entries: dict[str, JournalEntry] = {}
        if not self.path.exists():
            return entries
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                head = _HEAD.match(line) if _is_whole(line) else None
                if head is None:
                    if not line.endswith(b"\n"):
                        break  # a torn tail: that sample was never finished
                    raise DataError(
                        f"{self.path}, line {number}: the checksum does not fit; the file was damaged or edited. "
                        "Restore it, or delete that line to generate the sample again."
                    )
                sample_id = head["id"].decode()
                earlier = entries.get(sample_id)
                attempts = 1 + (earlier.attempts if earlier else 0)
                entries[sample_id] = JournalEntry(offset, sys.intern(head["reason"].decode()), attempts)
                offset += len(line)
        return entries

    def read_at(self, offset: int) -> Record:
        """The record at `offset` of the index."""
        if self._reader is None:
            self._reader = self.path.open("rb")
        self._reader.seek(offset)
        return _decode_record(self._reader.readline()[9:])

    def _cut_torn_tail(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:  # walk back to the last line break
                start = max(0, end - (1 << 16))
                file.seek(start)
                block = file.read(end - start)
                cut = block.rfind(b"\n")
                if cut >= 0:
                    file.truncate(start + cut + 1)
                    return
                end = start
            file.truncate(0)


def encode_record(record: Record) -> bytes:
    """One line of the journal; `id` and `reason` come first, so that an index needs no JSON parser."""
    assert list(record)[:2] == ["id", "reason"]
    body = json.dumps(record, separators=(",", ":")).encode("ascii")  # escapes keep any lone surrogate
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _decode_record(body: bytes) -> Record:
    record: Record
    try:
        record = orjson.loads(body)  # three times as fast on long lists of ids
    except orjson.JSONDecodeError:
        record = json.loads(body)  # orjson takes no lone surrogates
    return record


_HEAD = re.compile(rb'[0-9a-f]{8} \{"id":"(?P<id>[^"\\]+)","reason":"(?P<reason>[a-z_]+)",')


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n") and line[8:9] == b" " and line[:8] == b"%08x" % zlib.crc32(memoryview(line)[9:-1])
