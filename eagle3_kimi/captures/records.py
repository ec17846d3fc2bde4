"""What an audit keeps of a judged row: counts for the report, and the lines written out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eagle3_kimi.captures.context import CaptureContext
from eagle3_kimi.captures.lines import Block
from eagle3_kimi.captures.rows import Row, judge_block
from eagle3_kimi.captures.verdicts import CaptureVerdict, Code, Repair, Verdict

_DETAILS_PER_REASON = 2


class Choice(NamedTuple):
    """What is counted of one response."""

    format: str
    verdict: Verdict
    reason: Code
    token_exact: bool
    detail: str


@dataclass(slots=True, kw_only=True)
class RowSummary:
    """One row, small enough to be sent between processes."""

    line: int
    identity: int
    complete: bool
    torn: bool = False
    choices: list[Choice] = field(default_factory=list)
    kept_records: bytes = b""
    """Lines for `--out`."""
    refused_records: bytes = b""
    """Lines for `--quarantine`."""


def summarise_block(block: Block, *, file: str, context: CaptureContext, keep: bool) -> list[RowSummary]:
    """Judges a block. `keep` asks for the lines to write out as well."""
    told: Counter[Code] = Counter()
    return [_summarise(row, file, told, keep) for row in judge_block(block, context, file=file)]


def _summarise(row: Row, file: str, told: Counter[Code], keep: bool) -> RowSummary:
    choices = []
    for verdict in row.verdicts:
        told[verdict.reason] += 1
        detail = verdict.detail if told[verdict.reason] <= _DETAILS_PER_REASON else ""
        choices.append(
            Choice(verdict.format, verdict.verdict, verdict.reason, verdict.token_exact and verdict.complete, detail)
        )
    summary = RowSummary(
        line=row.line,
        identity=row.identity,
        complete=row.complete,
        torn=row.repair is Repair.TORN_TAIL_DROPPED,
        choices=choices,
    )
    if keep:
        summary.kept_records = b"".join(_kept_record(file, row, v) for v in row.verdicts if v.complete)
        summary.refused_records = b"".join(_refused_record(file, row, v) for v in row.verdicts if not v.complete)
        if summary.torn:
            summary.refused_records = _quarantined(file, row.line, row.raw, reason=Repair.TORN_TAIL_DROPPED)
    return summary


def _kept_record(file: str, row: Row, verdict: CaptureVerdict) -> bytes:
    record: dict[str, Any] = {
        "id": row.id,
        "file": file,
        "line": row.line,
        "choice_index": verdict.choice_index,
        "format": verdict.format,
        "verdict": verdict.verdict,
        "repairs": verdict.repairs,
        "prompt": verdict.prompt,
        "reasoning": verdict.reasoning,
        "content": verdict.content,
        "tool_calls": verdict.tool_calls,
        "finish_reason": verdict.finish_reason,
        "token_exact": verdict.token_exact,
        "prompt_token_ids": verdict.prompt_token_ids,
        "output_token_ids": verdict.output_token_ids,
    }
    return _encode(record) + b"\n"


def _refused_record(file: str, row: Row, verdict: CaptureVerdict) -> bytes:
    return _quarantined(
        file,
        row.line,
        row.raw,
        reason=verdict.reason,
        id=row.id,
        choice_index=verdict.choice_index,
        format=verdict.format,
        detail=verdict.detail,
    )


def duplicate_record(file: str, line: int, raw: bytes) -> bytes:
    """The quarantine's line for a row whose request is already there."""
    return _quarantined(file, line, raw, reason=Repair.DUPLICATE_DROPPED, detail="a row of this request was kept")


def _quarantined(file: str, line: int, raw: bytes, *, reason: Code, **more: Any) -> bytes:
    """`raw` goes in as text: what is damaged must not damage the quarantine."""
    record = {"file": file, "line": line, "reason": reason, **more, "record": raw.decode("utf-8", "replace")}
    return _encode(record) + b"\n"


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only an escape can hold it
        return json.dumps(record).encode()
