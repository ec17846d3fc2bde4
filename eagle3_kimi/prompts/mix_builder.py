"""A mix of sources -> a prompts artefact: `prompts.jsonl`, `refused.jsonl`, `report.json`.

    sources ──► rows ──► normalise ──► screen ──► spool ──► seeded order ──► prompts.jsonl
                (seeded)  (processes)  (once, no leak)
                                 └─────────┴──► refused.jsonl, by reason

Rows are normalised in any number of processes and screened in one, in order: the artefact depends on the mix,
its files, the locked revisions and the seed, and on nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts.conversations import Conversation, NormalisedRow, Reading, conversation_id, normalise_row
from eagle3_kimi.prompts.files import BadJson, load_conversations
from eagle3_kimi.prompts.mix import EvaluationSet, Mix, load_mix
from eagle3_kimi.prompts.ordered_map import ordered_map
from eagle3_kimi.prompts.report import MixReport, load_report
from eagle3_kimi.prompts.screening import Duplicates, EvaluationSets
from eagle3_kimi.prompts.shuffling import order_key
from eagle3_kimi.prompts.sources import Source, SourceRow, find_files, iter_rows, resolve_revisions
from eagle3_kimi.prompts.verdicts import Refusal
from eagle3_kimi.prompts.words import script_of, words_of

MIX_VERSION = 1
"""Raised when the same mix would give other rows."""

PROMPTS, REFUSED, REPORT = "prompts.jsonl", "refused.jsonl", "report.json"


def build_mix(
    path: Path,
    output: Path,
    *,
    num_proc: int = 1,
    seed: int | None = None,
    evaluation_sets: Iterable[EvaluationSet] = (),
    count_tokens: Callable[[Conversation], int] | None = None,
    skip_bad_files: bool = False,
) -> dict[str, Any]:
    """Builds the prompts artefact of a mix in the folder `output`, or keeps the one that is there.

    Args:
        num_proc: processes that normalise; the result does not depend on it.
        seed: instead of the mix's own.
        evaluation_sets: besides the mix's own; their files are relative to the working folder.
        count_tokens: the longest prompt of a conversation in the target's tokens; words are counted without it.
        skip_bad_files: go on when a file cannot be read; the report names it.

    Returns:
        the report, as in `report.json`.

    Raises:
        UsageError: the mix cannot be used as it stands.
        DataError: a file is damaged or of unknown shape.
    """
    mix = load_mix(path)
    mix = mix if seed is None else replace(mix, seed=seed)
    mix = replace(mix, evaluation_sets=(*_anchored(mix.evaluation_sets, path.parent), *evaluation_sets))
    if mix.max_prompt_tokens is not None and count_tokens is None:
        raise UsageError(f"{path}: `max_prompt_tokens` needs the target's tokenizer: give --target")
    revisions = resolve_revisions(path, mix.sources)
    fingerprint = _fingerprint(mix, path.parent, revisions, "words" if count_tokens is None else "tokens")
    finished = output / REPORT
    if finished.is_file() and load_report(finished).get("fingerprint") == fingerprint:
        return load_report(finished)
    output.mkdir(parents=True, exist_ok=True)
    finished.unlink(missing_ok=True)
    unit = "words" if count_tokens is None else "tokens"
    report = MixReport(fingerprint, mix.seed, unit, wanted=mix.counts, revisions=revisions)
    with (output / f".{REFUSED}").open("w", encoding="utf-8") as refused:
        builder = _MixBuilder(mix, report, refused, count_tokens, num_proc=num_proc, skip_bad_files=skip_bad_files)
        _write_in_order(builder.conversations(path.parent), output, mix.seed)
    (output / f".{REFUSED}").replace(output / REFUSED)
    _write_json(finished, report.as_dict())
    return report.as_dict()


def iter_conversations(paths: Iterable[str | Path]) -> Iterator[Conversation]:
    """Conversations of prompts artefacts (folders, or their `prompts.jsonl`)."""
    files = [Path(path) / PROMPTS if Path(path).is_dir() else Path(path) for path in paths]
    return load_conversations(files)


class _MixBuilder:
    """One pass over the sources. Everything that is refused is counted and listed."""

    def __init__(
        self,
        mix: Mix,
        report: MixReport,
        refused: IO[str],
        count_tokens: Callable[[Conversation], int] | None,
        *,
        num_proc: int,
        skip_bad_files: bool,
    ) -> None:
        self.mix, self.report, self.refused = mix, report, refused
        self.count_tokens, self.num_proc, self.skip_bad_files = count_tokens, num_proc, skip_bad_files
        self.duplicates = Duplicates(mix.near_duplicate_threshold)
        self.evaluation = EvaluationSets()
        for evaluation_set in mix.evaluation_sets:
            for file in evaluation_set.files:
                self.evaluation.add_file(evaluation_set.name, Path(file))

    def conversations(self, folder: Path) -> Iterator[Conversation]:
        for source in self.mix.sources:
            taken = 0
            if taken < self.report.wanted[source.name]:
                for conversation in self._of_source(source, folder):
                    yield conversation
                    taken += 1
                    if taken == self.report.wanted[source.name]:
                        break

    def _of_source(self, source: Source, folder: Path) -> Iterator[Conversation]:
        rows = iter_rows(
            source,
            folder=folder,
            revision=self.report.revisions.get(source.name),
            seed=self.mix.seed,
            on_bad_file=self._note_bad_file if self.skip_bad_files else None,
        )
        pairs = ordered_map(_normalise, ((row, source.reading) for row in rows), num_proc=self.num_proc)
        for row, normalised in pairs:
            first = not self.report.read[source.name]
            self.report.read[source.name] += 1
            if normalised.conversation is None:
                if first and normalised.refusal is Refusal.UNKNOWN_SHAPE:
                    raise DataError(
                        f"source {source.name} ({row.file}): its rows are not understood. {normalised.detail}"
                    )
                self._refuse(source, row, normalised.refusal, normalised.detail)
                continue
            conversation = _labelled(normalised.conversation, source)
            length = self._length(conversation)
            if self._screen(conversation, length, source, row):
                self.report.repaired.update(normalised.repairs)
                self.report.add(conversation, length)
                yield conversation

    def _screen(self, conversation: Conversation, length: int, source: Source, row: SourceRow) -> bool:
        limit = self.mix.max_prompt_tokens
        if limit is not None and length > limit:
            self._refuse(source, row, Refusal.TOO_LONG, f"{length} tokens; at most {limit} are asked for")
            return False
        users = [message["content"] for message in conversation.messages if message["role"] == "user"]
        leaked = self.evaluation.find(users)
        if leaked:
            self.report.leaked[leaked] += 1
            self._refuse(source, row, Refusal.LEAKED, f"shares a run of words with {leaked}")
            return False
        same = self.duplicates.check(conversation.id, words_of("\n".join(users)))
        if same:
            reason = Refusal.DUPLICATE if same == "exact" else Refusal.NEAR_DUPLICATE
            self._refuse(source, row, reason, f"an earlier prompt is the same ({same})")
        return not same

    def _length(self, conversation: Conversation) -> int:
        if self.count_tokens is not None:
            return self.count_tokens(conversation)
        return sum(len(words_of(message["content"])) for message in conversation.messages)

    def _refuse(self, source: Source, row: SourceRow, reason: Refusal | None, detail: str) -> None:
        self.report.refuse(source.name, str(reason))
        listed = {"source": source.name, "file": row.file, "row": row.row, "reason": reason, "detail": detail}
        self.refused.write(json.dumps(listed, ensure_ascii=True) + "\n")

    def _note_bad_file(self, file: Path, error: DataError) -> None:
        self.report.skipped_files.append(f"{file}: {error}")


def _normalise(item: tuple[SourceRow, Reading]) -> tuple[SourceRow, NormalisedRow]:
    row, reading = item
    bare = SourceRow(row.file, row.row, None)  # the raw row is not sent back from the worker
    if isinstance(row.value, BadJson):
        return bare, NormalisedRow(conversation=None, refusal=Refusal.INVALID_JSON, detail=row.value.message)
    return bare, normalise_row(row.value, reading)


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
            line = json.dumps(conversation.as_row(), ensure_ascii=False).encode() + b"\n"
            order.append((order_key(seed, conversation.id), file.tell(), len(line)))
            file.write(line)
    order.sort()
    with spool.open("rb") as source, temporary.open("wb") as target:
        for _, offset, length in order:
            source.seek(offset)
            target.write(source.read(length))
    spool.unlink()
    temporary.replace(output / PROMPTS)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _anchored(evaluation_sets: Iterable[EvaluationSet], folder: Path) -> Iterator[EvaluationSet]:
    for evaluation_set in evaluation_sets:
        yield replace(evaluation_set, files=tuple(str(folder / file) for file in evaluation_set.files))


def _fingerprint(mix: Mix, folder: Path, revisions: Mapping[str, str], unit: str) -> str:
    """Digest of all that decides the rows; where files lie does not."""
    decides = asdict(mix)
    for source, plain in zip(mix.sources, decides["sources"], strict=True):
        plain["files"] = [_digest(file) for file in find_files(source, folder)] if source.files else []
        plain["revision"] = revisions.get(source.name)
    for plain in decides["evaluation_sets"]:
        plain["files"] = [_digest(Path(file)) for file in plain["files"]]
    text = json.dumps([MIX_VERSION, unit, decides], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
