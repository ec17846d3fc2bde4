"""Files of captured responses as blocks of lines, whatever their layout: flat in memory.

A block is whole lines, one JSON record each. Pretty-printed JSON, arrays and event streams are rewritten
so; lines are cut at newline bytes only (U+2028 and its kind belong to strings).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_kimi.captures.sources import Read, open_source, read_again, read_fully
from eagle3_kimi.captures.streams import is_chunk

BLOCK_BYTES = 1 << 21
_HEAD = 1 << 16
_EVENT = re.compile(rb"(?:data|event|id|retry)?:")
_OPEN_ENDED = re.compile(rb"[\[{,]\s*$")
_SEPARATORS = re.compile(r"[\s,\]]*")
_MAX_RECORDS = 512


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of one file."""

    first_line: int
    """Number of the first line, from 1; of the first record where the file is not in lines."""
    data: bytes
    unterminated: bool = False
    """The one line in it ends where the file ends, without a newline."""


def read_blocks(source: Path | bytes, size: int = BLOCK_BYTES) -> Iterator[Block]:
    """Blocks of a file or of its bytes; gzip and UTF-16 are read as they are.

    Raises:
        UsageError: the file is in a format that holds no JSON text.
    """
    read = open_source(source)
    head = read_fully(read, _HEAD)
    read = read_again(head, read)
    layout = _guess_layout(head)
    if layout == "lines":
        return _blocks_of_lines(read, size)
    if layout == "events":
        return _blocks_of_records(_read_events(read, size), size)
    if layout == "whole":
        return iter([Block(1, b" ".join(_read_all(read).split(b"\n")), unterminated=True)])
    return _blocks_of_records(_read_documents(read, is_array=layout == "array"), size)


def _guess_layout(head: bytes) -> str:
    """`lines`, `documents` (records over several lines), `array` (of records), `whole` or `events` (server-sent)."""
    text = head.lstrip()
    first, _, rest = text.partition(b"\n")
    if _EVENT.match(text):
        return "events"
    if not text.startswith((b"{", b"[")):
        return "lines"
    is_array = text.startswith(b"[")
    if rest.strip() and _parsed(first) is not None:
        return "lines"
    if is_array:
        return "whole" if _belongs_together(text.decode("utf-8", "replace")) else "array"
    return "documents" if _OPEN_ENDED.search(first.rstrip()) else "lines"


def _belongs_together(text: str) -> bool:
    """An array of chunks is one stream, an array of messages one conversation."""
    try:
        item, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(item, dict) and (is_chunk(item) or ("role" in item and "choices" not in item) or "from" in item)


def _blocks_of_lines(read: Read, size: int) -> Iterator[Block]:
    pieces: list[bytes] = []
    line = 1
    while data := read(size):
        cut = data.rfind(b"\n") + 1
        if cut:
            block = b"".join([*pieces, data[:cut]])
            yield Block(line, block)
            line += block.count(b"\n")
            pieces = []
        pieces.append(data[cut:])
    if rest := b"".join(pieces):
        yield Block(line, rest, unterminated=True)


def _blocks_of_records(records: Iterable[bytes | Block], size: int) -> Iterator[Block]:
    waiting: list[bytes] = []
    first = number = 1
    for record in records:
        damaged = isinstance(record, Block)
        if waiting and (damaged or len(waiting) >= _MAX_RECORDS or sum(map(len, waiting)) >= size):
            yield Block(first, b"\n".join([*waiting, b""]))
            waiting, first = [], number
        if isinstance(record, Block):
            yield Block(number, record.data, record.unterminated)
        else:
            waiting.append(record)
        number += 1
    if waiting:
        yield Block(first, b"\n".join([*waiting, b""]))


def _read_documents(read: Read, *, is_array: bool) -> Iterator[bytes | Block]:
    """JSON values one after the other, or the items of one array, each as one line.

    No record can be found after damage; the rest comes as a block of its own, unterminated where it is cut off.
    """
    decoder, to_text = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")("replace")
    text, position, size = "", 0, _HEAD
    while True:
        data = read(size)
        text, position = text[position:] + to_text.decode(data, final=not data), 0
        if is_array and (opening := text.find("[")) >= 0:
            is_array, position = False, opening + 1
        cut_off = True
        while (position := _skip_separators(text, position)) < len(text):
            try:
                value, position = decoder.raw_decode(text, position)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip())
                break
            except RecursionError:
                data, cut_off = b"", False
                break
            yield json.dumps(value).encode()
        if not data:
            if rest := " ".join(text[position:].split()):
                yield Block(0, rest.encode("utf-8", "replace"), unterminated=cut_off)
            return
        size = max(_HEAD, len(text) - position)  # doubles inside one long record, which is scanned again each time


def _skip_separators(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    return match.end() if match else position


def _read_all(read: Read) -> bytes:
    pieces = []
    while data := read(BLOCK_BYTES):
        pieces.append(data)
    return b"".join(pieces)


def _read_events(read: Read, size: int) -> Iterator[bytes | Block]:
    """Server-sent events, each stream as one line `{"chunks": [...]}`; `[DONE]` or a new reply's id ends one."""
    chunks: list[bytes] = []
    reply: Any = None
    for block in _blocks_of_lines(read, size):
        for line in block.data.split(b"\n"):
            name, _, value = line.strip().partition(b":")
            value = value.strip()
            if name != b"data" or not value:
                continue
            chunk = _parsed(value) if value != b"[DONE]" else None
            new_reply = chunk.get("id") if isinstance(chunk, dict) else None
            if chunks and (value == b"[DONE]" or (new_reply and reply and new_reply != reply)):
                yield b'{"chunks": [' + b", ".join(chunks) + b"]}"
                chunks, reply = [], None
            if value != b"[DONE]":
                chunks.append(value)
                reply = new_reply or reply
    if chunks:
        yield b'{"chunks": [' + b", ".join(chunks) + b"]}"


def _parsed(value: bytes) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
