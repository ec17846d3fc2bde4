"""A mix of sources -> a prompts artefact: `prompts.jsonl`, `refused.jsonl`, `report.json`, `report.html`.

    sources ──► rows ──► normalise, measure ──► screen ──► spool ──► seeded order ──► prompts.jsonl
                (seeded)  (processes)            (once, no leak)
                                 └─────────────────┴──► refused.jsonl, by reason

Rows are normalised and measured in any number of processes and screened in one, in order: the artefact depends on
the mix, its files, the locked revisions, the seed and the target's tokenizer, and on nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts.conversations import Conversation, NormalisedRow, conversation_id, normalise_row
from eagle3_kimi.prompts.files import BadJson, RefusedRow, digest_of
from eagle3_kimi.prompts.lengths import TokenCounter, count_words
from eagle3_kimi.prompts.mix import EvaluationSet, Mix, load_mix
from eagle3_kimi.prompts.report import MixReport, load_report, render_html
from eagle3_kimi.prompts.screening import Duplicates, EvaluationSets, script_of, words_of
from eagle3_kimi.prompts.sources import Source, SourceRow, find_files, iter_rows, resolve_revisions
from eagle3_kimi.prompts.streams import OrderedPool
from eagle3_kimi.prompts.verdicts import Refusal

MIX_VERSION = 1
"""Raised when the same mix would give other rows."""

PROMPTS, REFUSED, REPORT, REPORT_PAGE = "prompts.jsonl", "refused.jsonl", "report.json", "report.html"


def build_mix(
    path: Path,
    output: Path,
    *,
    num_proc: int = 1,
    seed: int | None = None,
    evaluation_sets: Iterable[EvaluationSet] = (),
    count_tokens: TokenCounter | None = None,
    max_prompt_tokens: int | None = None,
    skip_bad_files: bool = False,
) -> dict[str, Any]:
    """Builds the prompts artefact of a mix in the folder `output`, or keeps the one that is there.

    Args:
        num_proc: processes that normalise and measure; the result does not depend on it.
        seed: instead of the mix's own.
        evaluation_sets: besides the mix's own; their files are relative to the working folder.
        count_tokens: measures prompts in the target's tokens; words are counted without it.
        max_prompt_tokens: instead of the mix's own.
        skip_bad_files: go on when a file cannot be read; the report names it.

    Returns:
        the report, as in `report.json`.

    Raises:
        UsageError: the mix cannot be used as it stands.
        DataError: a file is damaged or of unknown shape, or no conversation is left.
    """
    mix = load_mix(path)
    mix = replace(
        mix,
        seed=mix.seed if seed is None else seed,
        max_prompt_tokens=max_prompt_tokens or mix.max_prompt_tokens,
        evaluation_sets=(*_anchored(mix.evaluation_sets, path.parent), *evaluation_sets),
    )
    if mix.max_prompt_tokens is not None and count_tokens is None:
        raise UsageError(f"{path}: `max_prompt_tokens` needs the target's tokenizer: give --target")
    revisions = resolve_revisions(path, mix.sources)
    fingerprint = _fingerprint(mix, path.parent, revisions, count_tokens)
    finished = output / REPORT
    if finished.is_file() and load_report(finished).get("fingerprint") == fingerprint:
        return load_report(finished)
    output.mkdir(parents=True, exist_ok=True)
    finished.unlink(missing_ok=True)
    unit = "words" if count_tokens is None else "tokens"
    report = MixReport(fingerprint, mix.seed, unit, wanted=mix.counts, revisions=revisions)
    with (output / f".{REFUSED}").open("w", encoding="utf-8") as refused, OrderedPool(num_proc) as pool:
        builder = _MixBuilder(mix, report, refused, count_tokens or count_words, pool, skip_bad_files=skip_bad_files)
        _write_in_order(builder.conversations(path.parent), output, mix.seed)
    (output / f".{REFUSED}").replace(output / REFUSED)
    if not report.rows:
        raise DataError(f"{path}: no conversation is left of {report.read.total()} rows; {output / REFUSED} says why")
    _write_text(output / REPORT_PAGE, render_html(report.as_dict()))
    _write_text(finished, json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n")
    return report.as_dict()


def mix_fingerprint(path: Path, *, count_tokens: TokenCounter | None = None) -> str:
    """Digest of all that decides the conversations of a mix: its text, local files, locked revisions, tokenizer."""
    mix = load_mix(path)
    mix = replace(mix, evaluation_sets=tuple(_anchored(mix.evaluation_sets, path.parent)))
    return _fingerprint(mix, path.parent, resolve_revisions(path, mix.sources), count_tokens)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a worker made of one row; the raw row is not sent back."""

    file: str
    row: int
    normalised: NormalisedRow
    length: int = 0


@dataclass(frozen=True)
class _Prepare:
    """The work on one row that needs no other row."""

    source: Source
    length_of: Callable[[Conversation], int]

    def __call__(self, row: SourceRow) -> _Prepared:
        if isinstance(row.value, BadJson):
            bad = NormalisedRow(conversation=None, refusal=Refusal.INVALID_JSON, detail=row.value.message)
            return _Prepared(row.file, row.row, bad)
        normalised = normalise_row(row.value, self.source.reading)
        if normalised.conversation is None:
            return _Prepared(row.file, row.row, normalised)
        conversation = _labelled(normalised.conversation, self.source)
        normalised = replace(normalised, conversation=conversation)
        return _Prepared(row.file, row.row, normalised, self.length_of(conversation))


class _MixBuilder:
    """One pass over the sources. Everything that is refused is counted and listed."""

    def __init__(
        self,
        mix: Mix,
        report: MixReport,
        refused: IO[str],
        length_of: Callable[[Conversation], int],
        pool: OrderedPool,
        *,
        skip_bad_files: bool,
    ) -> None:
        self.mix, self.report, self.refused = mix, report, refused
        self.length_of, self.pool, self.skip_bad_files = length_of, pool, skip_bad_files
        self.duplicates = Duplicates(mix.near_duplicate_threshold)
        self.evaluation = EvaluationSets()
        for evaluation_set in mix.evaluation_sets:
            for file in evaluation_set.files:
                self.evaluation.add_file(evaluation_set.name, Path(file))

    def conversations(self, folder: Path) -> Iterator[Conversation]:
        for source in self.mix.sources:
            yield from islice(self._of_source(source, folder), self.report.wanted[source.name])

    def _of_source(self, source: Source, folder: Path) -> Iterator[Conversation]:
        rows = iter_rows(
            source,
            folder=folder,
            revision=self.report.revisions.get(source.name),
            seed=self.mix.seed,
            on_bad_file=self._note_bad_file if self.skip_bad_files else None,
        )
        for row in self.pool.map(_Prepare(source, self.length_of), rows):
            first = not self.report.read[source.name]
            self.report.read[source.name] += 1
            conversation, refusal = row.normalised.conversation, row.normalised.refusal
            detail = row.normalised.detail
            if first and refusal is Refusal.UNKNOWN_SHAPE:
                raise DataError(f"source {source.name} ({row.file}): its rows are not understood. {detail}")
            if conversation is not None:
                refusal, detail = self._screen(conversation, row.length)
            if refusal is not None:
                self._refuse(source, RefusedRow(row.file, row.row, refusal, detail))
                continue
            assert conversation is not None
            self.report.repaired.update(row.normalised.repairs)
            self.report.add(conversation, row.length)
            yield conversation

    def _screen(self, conversation: Conversation, length: int) -> tuple[Refusal | None, str]:
        """Why the conversation is not wanted, if so: too long, known to an evaluation set, or seen before."""
        limit = self.mix.max_prompt_tokens
        if limit is not None and length > limit:
            return Refusal.TOO_LONG, f"{length} tokens; at most {limit} are asked for"
        asked = [words_of(message["content"]) for message in conversation.messages if message["role"] == "user"]
        leaked = self.evaluation.find(asked)
        if leaked:
            self.report.leaked[leaked] += 1
            return Refusal.LEAKED, f"shares a run of words with {leaked}"
        same = self.duplicates.check(conversation.id, [word for words in asked for word in words])
        if same:
            reason = Refusal.DUPLICATE if same == "exact" else Refusal.NEAR_DUPLICATE
            return reason, f"an earlier prompt is the same ({same})"
        return None, ""

    def _refuse(self, source: Source, row: RefusedRow) -> None:
        self.report.refuse(source.name, row)
        listed = {"source": source.name, **asdict(row)}
        self.refused.write(json.dumps(listed, ensure_ascii=True) + "\n")

    def _note_bad_file(self, file: Path, error: DataError) -> None:
        self.report.skipped_files.append(f"{file}: {error}")


def _labelled(conversation: Conversation, source: Source) -> Conversation:
    """Ids of public data sets collide (0, 1, 2 ...): in a mix the content gives the id."""
    return replace(
        conversation,
        id=conversation_id(conversation.messages, list(conversation.tools or ())),
        source=source.name,
        language=source.language or conversation.language or script_of(conversation.prompt_text),
        domain=source.domain or conversation.domain,
    )


def _write_in_order(conversations: Iterable[Conversation], output: Path, seed: int) -> None:
    """Spools lines to disk and copies them in the seeded order: memory holds keys and offsets only."""
    spool, temporary = output / ".spool.jsonl", output / f".{PROMPTS}"
    order: list[tuple[bytes, int, int]] = []
    with spool.open("wb") as file:
        for conversation in conversations:
            key = hashlib.blake2b(f"{seed}:{conversation.id}".encode(), digest_size=16).digest()
            line = json.dumps(conversation.as_row(), ensure_ascii=False).encode() + b"\n"
            order.append((key, file.tell(), len(line)))
            file.write(line)
    order.sort()
    with spool.open("rb") as source, temporary.open("wb") as target:
        for _, offset, length in order:
            source.seek(offset)
            target.write(source.read(length))
    spool.unlink()
    temporary.replace(output / PROMPTS)


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _anchored(evaluation_sets: Iterable[EvaluationSet], folder: Path) -> Iterator[EvaluationSet]:
    for evaluation_set in evaluation_sets:
        yield replace(evaluation_set, files=tuple(str(folder / file) for file in evaluation_set.files))


def _fingerprint(mix: Mix, folder: Path, revisions: Mapping[str, str], count_tokens: TokenCounter | None) -> str:
    decides = asdict(mix)
    for source, plain in zip(mix.sources, decides["sources"], strict=True):
        plain["files"] = [digest_of(file) for file in find_files(source, folder)] if source.files else []
        plain["revision"] = revisions.get(source.name)
    for plain in decides["evaluation_sets"]:
        plain["files"] = [digest_of(Path(file)) for file in plain["files"]]
    text = json.dumps([MIX_VERSION, count_tokens and count_tokens.target.revision, decides], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
