"""Who a row is: duplicates are found by request id, or by what was asked; never by line number."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

_ID_NAMES = ("custom_id", "id", "sample_id", "uuid", "request_id")
_REPLY_KEYS = ("choices", "outputs", "meta_info", "chunks")
_PROMPT_NAMES = ("prompt", "messages", "conversations", "input", "question", "instruction", "request")


def row_id(row: Any) -> str | None:
    """The request's id, as the row gives it; a reply's own id (`chatcmpl-...`) is none."""
    if not isinstance(row, dict):
        return None
    for name in _ID_NAMES[:1] if any(key in row for key in _REPLY_KEYS) else _ID_NAMES:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    return None


def identity_of(row: Any, raw: bytes, *, name: str | None, prompt: Any = None, file: str = "") -> int:
    """64 bits that name the request behind a row.

    Its id, with the prompt where the row carries one; the prompt alone where there is no id; the row itself
    where there is neither. Bare numbers count within their file only: every shard starts again from 0.

    Args:
        row: the record.
        raw: its bytes.
        name: its `row_id`.
        prompt: what was asked, where that is known apart from the row.
        file: the file it stands in.
    """
    if prompt is None and isinstance(row, dict):
        for key in _PROMPT_NAMES:
            if row.get(key):
                prompt = _asked(row[key])
                break
    if name is None and prompt is None:
        return _digest(raw)
    sample = row.get("sample_index", "") if isinstance(row, dict) else ""
    scope = file if name is not None and name.isdigit() else ""
    asked = json.dumps(prompt, sort_keys=True, default=str) if prompt is not None else ""
    return _digest(f"{name}\0{sample}\0{scope}\0{asked}".encode("utf-8", "surrogatepass"))


def _asked(prompt: Any) -> Any:
    """A conversation without its last answer."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    role = str(last.get("role", last.get("from"))).lower() if isinstance(last, dict) else ""
    return prompt[:-1] if role in {"assistant", "gpt"} else prompt


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class IdentitySet:
    """Many 64-bit identities in 8 bytes each: sorted arrays, merged when they grow alike."""

    def __init__(self) -> None:
        self._levels: list[np.ndarray] = []

    def contains(self, identities: np.ndarray) -> np.ndarray:
        """Bool [N]: which of `identities` uint64 [N] are in the set."""
        found = np.zeros(len(identities), dtype=bool)
        for level in self._levels:
            at = np.minimum(np.searchsorted(level, identities), len(level) - 1)
            found |= level[at] == identities
        return found

    def add(self, identities: list[int]) -> None:
        if not identities:
            return
        self._levels.append(np.unique(np.array(identities, dtype=np.uint64)))
        while len(self._levels) > 1 and len(self._levels[-2]) <= 2 * len(self._levels[-1]):
            last, before = self._levels.pop(), self._levels.pop()
            self._levels.append(np.union1d(before, last))
