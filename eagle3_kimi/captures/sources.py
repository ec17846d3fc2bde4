"""The bytes of a capture file: gzip unpacked, UTF-16 and byte order marks read, damage left visible."""

from __future__ import annotations

import codecs
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import UsageError

Read = Callable[[int], bytes]
"""Reads up to so many bytes; none at the end."""

_PACKED = {
    b"PAR1": "Parquet; load it with datasets and write JSONL",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "zstandard; unpack it first",
    b"\xfd7zX": "xz; unpack it first",
    b"BZh": "bzip2; unpack it first",
}
_GZIP = b"\x1f\x8b"
_PIECE = 1 << 16
CUT_OFF = b"\0"
"""Stands for the lost end of a cut gzip file: a line that holds it is torn."""
DAMAGED = b"\n\xff damaged gzip data\n"
"""Stands for what cannot be unpacked: a line that no reader takes for JSON."""


def open_source(source: Path | bytes) -> Read:
    """The text of a file, or of its bytes, as UTF-8.

    Raises:
        UsageError: the file is in a format that holds no JSON text.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    magic = stream.read(4)
    stream.seek(0)
    for start, advice in _PACKED.items():
        if magic.startswith(start):
            raise UsageError(f"{source if isinstance(source, Path) else 'the data'}: expected JSON, came {advice}")
    read: Read = _Gunzip(stream).read if magic.startswith(_GZIP) else stream.read
    start = read_fully(read, 3)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _as_utf8(read_again(start, read))
    return read if start == codecs.BOM_UTF8 else read_again(start, read)


def read_fully(read: Read, size: int) -> bytes:
    """Reads `size` bytes, fewer only at the end."""
    pieces, missing = [], size
    while missing and (piece := read(missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def read_again(head: bytes, read: Read) -> Read:
    """Reads `head`, which was read already, before the rest."""
    waiting = io.BytesIO(head)
    return lambda size: waiting.read(size) or read(size)


def _as_utf8(read: Read) -> Read:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")

    def read_text(size: int) -> bytes:
        while data := read(size):
            if text := decoder.decode(data):
                return text.encode("utf-8", "surrogatepass")
        return b""

    return read_text


class _Gunzip:
    """Unpacks gzip in pieces, up to where it is cut off or damaged; several members are one text."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._inflate = zlib.decompressobj(wbits=31)
        self._packed = b""
        self._ended = False

    def read(self, size: int) -> bytes:
        while not self._ended:
            self._packed = self._packed or self._stream.read(_PIECE)
            if not self._packed:
                return self._end(CUT_OFF)
            try:
                data = self._inflate.decompress(self._packed, size)
            except zlib.error:
                return self._end(DAMAGED)
            self._packed = self._inflate.unconsumed_tail
            if self._inflate.eof:
                self._next_member()
            if data:
                return data
        return b""

    def _next_member(self) -> None:
        """Starts the next member; zero bytes after the last one are padding."""
        self._packed = self._inflate.unused_data.lstrip(b"\0")
        while not self._packed and (piece := self._stream.read(_PIECE)):
            self._packed = piece.lstrip(b"\0")
        self._inflate = zlib.decompressobj(wbits=31)
        self._ended = not self._packed

    def _end(self, sign: bytes) -> bytes:
        self._ended = True
        return sign
