"""Streams: chunks and server-sent events joined into the turns they spell."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from eagle3_kimi.captures.fields import PART_LISTS, REASONING_NAMES
from eagle3_kimi.captures.turns import Turn
from eagle3_kimi.captures.verdicts import Fault

FORMAT = "openai.chat.completion.chunks"


def is_chunk(record: Mapping[str, Any]) -> bool:
    """True for a piece of a stream: its choices carry a delta, or it says so."""
    choices = record.get("choices")
    if str(record.get("object", "")).endswith(".chunk"):
        return True
    return isinstance(choices, list) and any(isinstance(c, dict) and "delta" in c for c in choices)


def parse_sse(text: str) -> list[Any]:
    """The JSON of each `data:` line of server-sent events; comments, other fields and `[DONE]` are passed over.

    Raises:
        ValueError: a data line that is no JSON, or no data line at all.
    """
    chunks = []
    for line in text.split("\n"):
        name, colon, value = line.strip("\r").partition(":")
        value = value.strip()
        if name == "data" and value and value != "[DONE]":
            chunks.append(json.loads(value))
        elif line.strip() and not (colon and name in {"", "data", "event", "id", "retry"}):
            raise ValueError(f"{line[:40]!r} is no line of a stream")
    if not chunks:
        raise ValueError("no data line")
    return chunks


def merge_chunks(chunks: list[Any], read_whole: Callable[[Any], list[Turn]]) -> list[Turn]:
    """Joins a stream's chunks choice by choice, each choice on its own.

    Args:
        read_whole: reads a record that is no chunk (SGLang streams the whole text again each time).
    """
    if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
        return [Turn(format=FORMAT, message={}, fault=(Fault.NO_CHOICES, "the stream holds no chunks"))]
    if any("meta_info" in chunk for chunk in chunks):
        return _merge_whole(chunks, read_whole)
    joined: dict[int, _Choice] = {}
    fault: tuple[Fault, str] | None = None
    for chunk in chunks:
        choices = chunk.get("choices")
        if chunk.get("error") or chunk.get("object") == "error":
            fault = (Fault.UPSTREAM_ERROR, f"the stream broke off: {chunk.get('error') or chunk}"[:200])
        for position, piece in enumerate(choices if isinstance(choices, list) else []):
            if isinstance(piece, dict):
                index = _int(piece.get("index"), position)
                joined.setdefault(index, _Choice(index)).add(piece)
    ids = {chunk["id"] for chunk in chunks if isinstance(chunk.get("id"), str) and chunk["id"]}
    if len(ids) > 1:
        fault = fault or (Fault.MIXED_STREAM, f"chunks of {len(ids)} replies in one stream")
    if not joined:
        none = (Fault.NO_CHOICES, "the stream holds no choices")
        return [Turn(format=FORMAT, message={}, fault=fault or none)]
    prompt_ids = next((chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")), None)
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    turns = [joined[index].as_turn(fault) for index in sorted(joined)]
    for turn in turns:
        turn.prompt_token_ids = turn.prompt_token_ids or prompt_ids
        turn.usage = usage if len(turns) == 1 else None
    return turns


def _merge_whole(chunks: list[Any], read_whole: Callable[[Any], list[Turn]]) -> list[Turn]:
    """SGLang's stream: each event repeats the whole text so far, so the last one of each choice counts."""
    last = {_int(chunk.get("index"), 0): chunk for chunk in chunks}
    return [turn for chunk in last.values() for turn in read_whole(chunk)]


def _int(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


class _Choice:
    """One choice of a stream, growing."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: dict[str, list[str]] = {}
        self.parts: dict[str, list[Any]] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.token_ids: list[Any] = []
        self.prompt_token_ids: Any = None
        self.finish: Any = None
        self.stop: Any = None
        self.native_finish: Any = None
        self.role: Any = "assistant"
        self.raw = True
        self.fault: tuple[Fault, str] | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        if piece.get("error"):
            self.fault = (Fault.UPSTREAM_ERROR, str(piece["error"])[:200])
        delta = piece.get("delta", piece.get("message"))
        if isinstance(delta, dict):
            self.raw = False
            self._add_delta(delta)
        else:
            self._add_text("content", piece.get("text"))
        if isinstance(piece.get("token_ids"), list):
            self.token_ids.extend(piece["token_ids"])
        self.prompt_token_ids = piece.get("prompt_token_ids") or self.prompt_token_ids
        finish = piece.get("finish_reason")
        if finish is not None and self.finish is not None and finish != self.finish:
            self.fault = self.fault or (Fault.CONFLICTING_FINISH, f"finished twice: {self.finish} and {finish}")
        self.finish = self.finish if finish is None else finish
        self.stop = piece.get("stop_reason") or self.stop
        self.native_finish = piece.get("native_finish_reason") or self.native_finish

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        self.role = delta.get("role") or self.role
        for name in REASONING_NAMES:
            if delta.get(name):
                self._check_order(name, delta[name])
                self._add_text(name, delta[name])
        for name in PART_LISTS:
            if delta.get(name):
                self._check_order(name, delta[name])
                self.parts.setdefault(name, []).extend(delta[name] if isinstance(delta[name], list) else [delta[name]])
        self._add_text("content", delta.get("content"))
        self._add_text("refusal", delta.get("refusal"))
        calls = delta.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            self.fault = self.fault or (Fault.WRONG_TYPE, "tool_calls of a delta: expected a list of objects")
            return
        for position, call in enumerate(calls):
            self._add_call(call, position)

    def _add_text(self, name: str, value: Any) -> None:
        if not value:
            return
        if self.finish is not None and str(value).strip():
            self.fault = self.fault or (Fault.CONFLICTING_FINISH, f"{name} after the finish reason")
        if isinstance(value, str):
            self.texts.setdefault(name, []).append(value)
        else:
            self.parts.setdefault(name, []).extend(value if isinstance(value, list) else [value])

    def _check_order(self, name: str, value: Any) -> None:
        if str(value).strip() and "".join(self.texts.get("content", ())).strip():
            self.fault = self.fault or (Fault.AMBIGUOUS_SPLIT, f"{name} after the answer has begun")

    def _add_call(self, piece: Mapping[str, Any], position: int) -> None:
        call = self.calls.setdefault(_int(piece.get("index"), position), {"function": {}})
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        for key in ("id", "type"):
            call[key] = piece.get(key) or call.get(key)
        merged = call["function"]
        merged["name"] = merged.get("name") or function.get("name")
        before, arguments = merged.get("arguments"), function.get("arguments")
        if isinstance(before, str) and isinstance(arguments, str):
            merged["arguments"] = before + arguments
        elif arguments is not None:
            merged["arguments"] = arguments

    def as_turn(self, fault: tuple[Fault, str] | None) -> Turn:
        message: dict[str, Any] = {"role": self.role, **self.parts}
        for name, pieces in self.texts.items():
            text = "".join(pieces)
            message[name] = text if name not in self.parts else [text, *self.parts[name]]
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return Turn(
            format=FORMAT if not self.raw else "openai.text_completion.chunks",
            message=message,
            index=self.index,
            finish=self.finish,
            stop=self.stop,
            native_finish=self.native_finish,
            raw=self.raw,
            token_ids=self.token_ids or None,
            prompt_token_ids=self.prompt_token_ids,
            fault=self.fault or fault,
        )
