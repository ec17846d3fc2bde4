"""What a row of the data set must be, and the check of rows that were loaded. `features` enforces it at write time.

Importing this module is light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3_kimi.errors import DataError
from eagle3_kimi.protocol import SpanKind, is_blank

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning; part of every fingerprint."""

REQUIRED_COLUMNS = ("id", "prompt_token_ids", "output_token_ids", "spans", "reasoning", "schema_version")
"""What hidden-state extraction and training rely on."""


@dataclass(frozen=True)
class RowFault:
    """One rule that one row breaks."""

    row: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"row {self.row}, field {self.field}: {self.message}"


PROVENANCE: dict[str, str] = {
    "model": "string",
    "revision": "string",
    "engine": "string",
    "engine_version": "string",
    "protocol": "string",
    "tokenizer_hash": "string",
    "template_hash": "string",
    "temperature": "float32",
    "top_p": "float32",
    "max_tokens": "int32",
    "seed": "int64",
}
"""Where a sample came from; the same for every sample of a run but for `seed`."""


def find_row_faults(row: Mapping[str, Any], index: int = 0, vocab_size: int | None = None) -> list[RowFault]:
    """The rules that `row` breaks: reasoning, ids, spans inside the ids, counts that add up."""
    faults: list[RowFault] = []

    def fault(field: str, message: str) -> None:
        faults.append(RowFault(index, field, message))

    for field in ("id", "reasoning"):
        if not isinstance(row.get(field), str) or is_blank(row[field]):
            fault(field, f"expected text that is not blank, got {row.get(field)!r}")
    if row.get("schema_version") != SCHEMA_VERSION:
        fault("schema_version", f"expected {SCHEMA_VERSION}, got {row.get('schema_version')!r}")
    for field in ("prompt_token_ids", "output_token_ids"):
        ids = row.get(field)
        if not ids:
            fault(field, "expected at least one token id, got none")
        elif None in ids:
            fault(field, "expected token ids, got null among them")
        elif min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
            fault(field, f"token ids must lie in [0, {vocab_size or '...'}), got {min(ids)}..{max(ids)}")
    spans: Sequence[Mapping[str, Any]] = row.get("spans") or []
    message = find_span_fault(spans, len(row.get("output_token_ids") or ()))
    if message:
        fault("spans", message)
    elif "num_reasoning_tokens" in row and row["num_reasoning_tokens"] != spans[0]["end"] - spans[0]["start"]:
        fault("num_reasoning_tokens", f"is {row['num_reasoning_tokens']}, but the reasoning span has another length")
    if is_blank(row.get("content") or "") and (row.get("tool_calls") or "[]") == "[]":
        fault("content", "expected an answer or tool calls, got neither")
    counts = {"num_prompt_tokens": "prompt_token_ids", "num_output_tokens": "output_token_ids"}
    for field, column in counts.items():
        if field in row and row[field] != len(row.get(column) or ()):
            fault(field, f"is {row[field]}, but {column} has {len(row.get(column) or ())} ids")
    return faults


def find_span_fault(spans: Sequence[Mapping[str, Any]], num_output_tokens: int | None = None) -> str:
    """What is wrong with the spans of one row, or an empty string. Without a length, ends are not limited."""
    previous, kinds = 0, []
    for span in spans:
        kind, start, end = span["kind"], span["start"], span["end"]
        if kind not in set(SpanKind):
            return f"unknown kind {kind!r}; known: {', '.join(SpanKind)}"
        if start is None or end is None or not previous <= start < end:
            return f"span [{start}, {end}) is empty or out of order"
        if num_output_tokens is not None and end > num_output_tokens:
            return f"span [{start}, {end}) is outside the {num_output_tokens} output ids"
        previous = end
        kinds.append(kind)
    if kinds[:1] != [SpanKind.REASONING] or kinds.count(SpanKind.REASONING) != 1:
        return f"expected one reasoning span, first of all; got {kinds}"
    return ""


def check_rows(rows: Sequence[Mapping[str, Any]], vocab_size: int | None = None) -> None:
    """Raises `DataError` naming the first faults of `rows`."""
    faults = [fault for index, row in enumerate(rows) for fault in find_row_faults(row, index, vocab_size)]
    if faults:
        shown = "; ".join(map(str, faults[:3]))
        raise DataError(f"{len(faults)} faults in {len(rows)} rows: {shown}. Such rows belong in quarantine.")


def validate(dataset: Dataset | DatasetDict, *, vocab_size: int | None = None, batch_size: int = 1000) -> int:
    """Checks every row of a data set that was loaded (reloading and `.cast` check nothing by themselves).

    Returns:
        The number of rows checked.

    Raises:
        DataError: a column is missing or a row is not reasoning-complete; names split, row and field.
    """
    splits = dataset.items() if isinstance(dataset, dict) else [("", dataset)]
    total = 0
    for name, split in splits:
        missing = [column for column in REQUIRED_COLUMNS if column not in split.column_names]
        if missing:
            raise DataError(
                f"split {name or '(the data set)'}: columns {missing} are missing; found {split.column_names}"
            )
        plain = split.with_format(None)
        for start in range(0, len(split), batch_size):
            batch = plain[start : start + batch_size]
            rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            faults = [f for i, row in enumerate(rows) for f in find_row_faults(row, start + i, vocab_size)]
            if faults:
                shown = "; ".join(map(str, faults[:3]))
                raise DataError(f"split {name or '(the data set)'} is not reasoning-complete: {shown}")
        total += len(split)
    return total
