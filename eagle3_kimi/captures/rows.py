"""Rows of a capture file or a batch: parsed, judged, duplicates and torn ends told apart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from eagle3_kimi.captures.context import CaptureContext
from eagle3_kimi.captures.identity import identity_of, row_id
from eagle3_kimi.captures.judge import judge
from eagle3_kimi.captures.lines import Block, read_blocks
from eagle3_kimi.captures.verdicts import CaptureVerdict, Code, Fault, Repair, Verdict, worst
from eagle3_kimi.protocol import Reason


@dataclass(slots=True, kw_only=True)
class Row:
    """One record of a file or batch, judged."""

    line: int
    id: str | None = None
    identity: int = 0
    verdicts: list[CaptureVerdict] = field(default_factory=list)
    """One per choice; none for a torn tail."""
    repair: Repair | None = None
    """What happened to the row itself: a torn tail, a duplicate, or a line cut in two."""
    raw: bytes = b""

    @property
    def dropped(self) -> bool:
        return self.repair in {Repair.TORN_TAIL_DROPPED, Repair.DUPLICATE_DROPPED}

    @property
    def complete(self) -> bool:
        """At least one choice can be used."""
        return not self.dropped and any(verdict.complete for verdict in self.verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVerdict:
    """The verdict on a file or batch: the worst of its rows', with what was kept."""

    verdict: Verdict
    reason: Code
    detail: str = ""
    format: str = ""
    kept: list[str | None]
    """Ids of the rows kept, in order; None for a row without an id."""
    dropped: int
    """Duplicates and torn tails left out."""
    line: int | None
    """The first line with a fault."""
    rows: list[Row]


def judge_file(source: Path | str | bytes, context: CaptureContext | Mapping[str, Any] | None = None) -> FileVerdict:
    """Judges every row of a file (or of its bytes): JSONL, JSON, event streams, gzip.

    For files that fit in memory; `audit.run_audit` streams.
    """
    known = CaptureContext.of(context)
    source = Path(source) if isinstance(source, str) else source
    rows = [row for block in read_blocks(source) for row in judge_block(block, known)]
    return _conclude(rows)


def judge_records(
    records: Sequence[Any],
    prompts: Sequence[Any] | None = None,
    context: CaptureContext | Mapping[str, Any] | None = None,
) -> FileVerdict:
    """Judges a batch of parsed records. `prompts` are what was asked, record by record."""
    known = CaptureContext.of(context)
    if prompts is not None and len(prompts) != len(records):
        detail = f"{len(records)} records and {len(prompts)} prompts: which belongs to which?"
        return FileVerdict(
            verdict=Verdict.REJECT,
            reason=Fault.PROMPTS_DO_NOT_MATCH,
            detail=detail,
            kept=[],
            dropped=0,
            line=None,
            rows=[],
        )
    rows = []
    for index, record in enumerate(records):
        prompt = prompts[index] if prompts is not None else None
        own = known if prompt is None else dataclasses.replace(known, prompt=prompt)
        raw = json.dumps(record, sort_keys=True, default=str).encode()
        name = row_id(record)
        identity = identity_of(record, raw, name=name, prompt=prompt)
        rows.append(Row(line=index + 1, id=name, identity=identity, verdicts=judge(record, own), raw=raw))
    return _conclude(rows)


def judge_block(block: Block, context: CaptureContext, *, file: str = "") -> Iterator[Row]:
    """Judges the lines of a block. Blank lines are no rows."""
    for offset, line in enumerate(block.data.split(b"\n")):
        number = block.first_line + offset
        if not line.strip():
            continue
        records = _parse_line(line)
        if records is None:
            yield _damaged_row(number, line, torn=block.unterminated)
            continue
        for record in records:
            raw, name = line if len(records) == 1 else json.dumps(record).encode(), row_id(record)
            yield Row(
                line=number,
                id=name,
                identity=identity_of(record, raw, name=name, file=file),
                verdicts=judge(record, context),
                repair=Repair.JOINED_LINES_SPLIT if len(records) > 1 else None,
                raw=raw,
            )


def _parse_line(line: bytes) -> list[Any] | None:
    """The record of a line, or its several records where a newline was lost; None where it is damaged."""
    try:
        return [orjson.loads(line)]
    except orjson.JSONDecodeError:  # it takes no lone surrogates, no NaN and no byte order mark
        return _parse_slowly(line)


def _parse_slowly(line: bytes) -> list[Any] | None:
    try:
        text = line.decode("utf-8").removeprefix("\ufeff")
        return [json.loads(text)]
    except RecursionError:
        return None
    except json.JSONDecodeError as error:
        return _several_records(text) if error.msg == "Extra data" else None
    except ValueError:
        return None


def _several_records(text: str) -> list[Any] | None:
    decoder, records, position = json.JSONDecoder(), [], 0
    text = text.strip()
    while position < len(text):
        try:
            record, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        records.append(record)
        position += len(text[position:]) - len(text[position:].lstrip())
    return records


def _damaged_row(number: int, line: bytes, *, torn: bool) -> Row:
    if torn:
        return Row(line=number, repair=Repair.TORN_TAIL_DROPPED, raw=line)
    detail = f"line {number} is no JSON: {line[:60].decode('utf-8', 'replace')!r}"
    refused = CaptureVerdict(verdict=Verdict.REJECT, reason=Fault.CORRUPT_LINE, detail=detail, format="unknown")
    return Row(line=number, verdicts=[refused], raw=line)


def mark_duplicates(rows: list[Row]) -> None:
    """Of the rows of one request the first complete one is kept (or the first, where none is)."""
    chosen: dict[int, Row] = {}
    for row in rows:
        if row.dropped or row.verdicts[0].reason is Fault.CORRUPT_LINE:
            continue
        before = chosen.get(row.identity)
        if before is None or (row.complete and not before.complete):
            chosen[row.identity] = row
            row = before or row
        if chosen[row.identity] is not row:
            row.repair = Repair.DUPLICATE_DROPPED


def _conclude(rows: list[Row]) -> FileVerdict:
    mark_duplicates(rows)
    kept = [row.id for row in rows if row.complete]
    dropped = [row for row in rows if row.dropped]
    told = [(verdict.verdict, verdict.reason, row) for row in rows if not row.dropped for verdict in row.verdicts]
    told += [(Verdict.REPAIR, row.repair, row) for row in rows if row.repair]
    outcome = worst(verdict for verdict, _, _ in told)
    reason: Code = Reason.OK
    line, detail = None, ""
    if outcome is not Verdict.ACCEPT:
        _, reason, first = next(item for item in told if item[0] is outcome)
        line = first.line
        detail = next((verdict.detail for verdict in first.verdicts if verdict.reason is reason), "")
    if not kept and outcome is not Verdict.REJECT:
        outcome, reason, detail = Verdict.REJECT, Fault.EMPTY_FILE, "no row can be kept"
    formats = {verdict.format for row in rows for verdict in row.verdicts}
    return FileVerdict(
        verdict=outcome,
        reason=reason,
        detail=detail,
        format=" and ".join(sorted(formats)),
        kept=kept,
        dropped=len(dropped),
        line=line,
        rows=rows,
    )
