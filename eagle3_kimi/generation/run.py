"""The run loop: conversations -> generations -> journal. Replay first, generate what is missing."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.engines import EngineInfo, Generation, GenerationRequest, TargetEngine, open_engine
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.errors import DataError, EngineError
from eagle3_kimi.generation.breaker import CircuitBreaker
from eagle3_kimi.generation.chains import Chain, PlannedTurn
from eagle3_kimi.generation.config import GenerationConfig, journal_key, request_seed
from eagle3_kimi.generation.journal import Journal, JournalEntry, default_journal_dir
from eagle3_kimi.generation.preflight import check_canaries, check_prompt_rendering
from eagle3_kimi.generation.progress import GenerationProgress
from eagle3_kimi.generation.rows import build_provenance, build_quarantine_row, build_row
from eagle3_kimi.prompts import Conversation
from eagle3_kimi.protocol import Reason, ToolCall, TurnReading
from eagle3_kimi.target import Target, resolve_target

if TYPE_CHECKING:
    from eagle3_kimi.generation.capture import StateCapture

OpenEngine = Callable[[str, Target, EngineOptions], TargetEngine]

_CHAINS_AHEAD = 2048
"""Conversations opened ahead of the engine: enough to keep it full, few enough for flat memory."""


@dataclass
class RunReport:
    """Rows in = complete + quarantined + not run."""

    planned: int = 0
    complete: int = 0
    generated: int = 0
    """Turns generated now; the others came from the journal."""
    not_run: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    ended_conversations: Counter[str] = field(default_factory=Counter)
    chains: list[tuple[str, list[str]]] = field(default_factory=list, repr=False)
    """Conversation id and the ids of its finished turns, in prompt order."""
    index: dict[str, JournalEntry] = field(default_factory=dict, repr=False)
    """The journal's, with what this run added."""

    def finished_turns(self) -> Iterator[tuple[str, JournalEntry]]:
        """Conversation id and journal entry of every finished turn, in prompt order.

        No prompt is rendered again for it: over a long journal that takes longer than reading it.
        """
        for conversation_id, turn_ids in self.chains:
            for turn_id in turn_ids:
                yield conversation_id, self.index[turn_id]

    @property
    def quarantined(self) -> int:
        return sum(self.by_reason.values())

    def __str__(self) -> str:
        text = f"{self.planned} planned turns = {self.complete} complete + {self.quarantined} quarantined"
        text += f" + {self.not_run} not run; {self.generated} generated now"
        for counts in (self.by_reason, self.ended_conversations):
            text += "".join(f"\n  {reason:28} {count:6}" for reason, count in counts.most_common())
        return text


class GenerationRun:
    """One run over conversations.

    `run()` generates what the journal lacks; its report finds every record, in prompt order. What it finds are
    places in the journal's file, so other processes may read the records.
    """

    def __init__(self, config: GenerationConfig, *, open_engine: OpenEngine | None = None) -> None:
        self.config = config
        self.open_engine = open_engine
        self.target = resolve_target(
            config.target, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        self.tokenizer = self.target.load_tokenizer()
        self.protocol = self.target.load_protocol(self.tokenizer, min_reasoning_tokens=config.min_reasoning_tokens)
        self.key = journal_key(config, self.target, self.tokenizer)
        self.journal = Journal(config.journal_dir or default_journal_dir(), self.key)
        check_prompt_rendering(self.tokenizer, self.protocol)

    def render(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        """Prompt ids of the next turn."""
        return render_prompt(self.tokenizer, messages, tools=tools, preset=self.protocol.preset)

    def chains(self, conversations: Iterable[Conversation]) -> Iterator[Chain]:
        """Every chain of the run, in prompt order."""
        for conversation in conversations:
            for index in range(self.config.samples_per_prompt):
                yield Chain(conversation, index, self.render)

    def run(self, conversations: Iterable[Conversation]) -> RunReport:
        """Generates every turn that the journal lacks.

        Raises:
            RunStopped: the circuit breaker tripped, the disk is full, or another run writes this journal.
            TargetError: the preflight failed.
            DataError: hidden states fail the contract check, or the store is another run's.
        """
        with self.journal as journal, ExitStack() as stack:
            capture = self._open_capture()
            if capture is not None:
                stack.enter_context(capture)
            return _Loop(self, journal, capture).run(self.chains(conversations))

    def _open_capture(self) -> StateCapture | None:
        if self.config.capture is None:
            return None
        from eagle3_kimi.generation.capture import StateCapture

        return StateCapture(self.config.capture, self.config, self.target, self.protocol.preset.name)


class _Loop:
    """The state of one run: which chain waits for which request."""

    def __init__(self, run: GenerationRun, journal: Journal, capture: StateCapture | None) -> None:
        self._config, self._protocol, self._journal = run.config, run.protocol, journal
        self._run, self._capture = run, capture
        self._queue: deque[GenerationRequest] = deque()
        self._waiting: dict[str, tuple[Chain, PlannedTurn]] = {}
        self._report = RunReport(index=journal.index())
        self._index = self._report.index
        self._breaker = CircuitBreaker(
            window=run.config.breaker_window,
            max_truncated=run.config.max_truncated,
            max_incomplete=run.config.max_incomplete,
        )

    def run(self, chains: Iterator[Chain]) -> RunReport:
        self._refill(chains)
        if self._queue:
            opener = self._run.open_engine or (self._capture.open_engine if self._capture else open_engine)
            engine = opener(self._config.engine, self._run.target, self._config.options)
            try:
                self._generate(engine, chains)
            finally:
                engine.close()
        return self._report

    def _generate(self, engine: TargetEngine, chains: Iterator[Chain]) -> None:
        config, stop = self._config, self._protocol.markers.stop_token_ids
        check_canaries(engine, self._run.tokenizer, self._protocol, config.sampling)
        with GenerationProgress() as progress:
            for generation in engine.generate(self._queue, config.sampling, stop):
                if self._capture is None or not self._capture.take_missing(generation):
                    chain, turn = self._waiting.pop(generation.request_id)
                    reading = self._finish(chain, turn, generation, engine.info)
                    tokens = len(generation.output_token_ids)
                    progress.advance(complete=reading.complete, tokens=tokens, left=len(self._waiting))
                    self._advance(chain)
                self._refill(chains)
        if self._num_open:
            raise EngineError(f"the engine {engine.info.name} ended with {self._num_open} requests unanswered")
        self._breaker.finish()

    @property
    def _num_open(self) -> int:
        """Requests without an answer."""
        return len(self._waiting) + (self._capture.num_missing if self._capture else 0)

    def _refill(self, chains: Iterator[Chain]) -> None:
        while self._num_open < _CHAINS_AHEAD and (chain := next(chains, None)) is not None:
            self._report.planned += chain.num_planned
            self._report.chains.append((chain.conversation.id, chain.finished_turn_ids))
            self._advance(chain)

    def _advance(self, chain: Chain) -> None:
        """Plays journaled turns; asks for the first that is missing; counts what will not be run."""
        while (turn := chain.next_turn()) is not None:
            entry = self._index.get(turn.id)
            if entry is None or (self._config.retry_rejected and entry.reason != Reason.OK):
                self._waiting[turn.id] = (chain, turn)
                request = GenerationRequest(
                    id=turn.id, prompt_token_ids=turn.prompt_token_ids, seed=self._seed(turn.id)
                )
                self._queue.append(request)
                return
            reading = _replay(self._journal, entry, chain)
            if self._capture is not None and reading.complete:
                missing = self._capture.request_missing(self._journal.read_at(entry.offset)["row"])
                self._queue.extend([missing] if missing else [])
            self._count(reading)
            chain.accept(reading)
        if chain.num_not_run:
            self._report.not_run += chain.num_not_run
            self._report.ended_conversations[chain.end_reason] += 1

    def _seed(self, sample_id: str) -> int:
        entry = self._index.get(sample_id)
        return request_seed(self._config.seed, sample_id, entry.attempts if entry else 0)

    def _finish(self, chain: Chain, turn: PlannedTurn, generation: Generation, info: EngineInfo) -> TurnReading:
        prompt, output = generation.prompt_token_ids, generation.output_token_ids
        reading = self._protocol.read(prompt, output, generation.finish_reason)
        if prompt != turn.prompt_token_ids:
            raise DataError(f"the engine answered another prompt than sample {turn.id} asked: {info}")
        source, captured = chain.conversation.source, None
        if reading.complete:
            name, preset = self._run.target.name, self._protocol.preset.name
            provenance = build_provenance(self._run.key, name, info, preset, self._seed(turn.id))
            row = build_row(turn, source, generation, reading, provenance)
            if self._capture is not None:
                try:
                    captured = self._capture.check(row, generation)
                except DataError as error:  # an engine whose states are bad has failed, whatever it answered
                    generation = replace(generation, finish_reason="error", error=str(error))
                    reading = self._protocol.read(prompt, output, generation.finish_reason)
        if not reading.complete:
            row = build_quarantine_row(turn, source, generation, reading, self._protocol)
        reason, earlier = str(reading.reason), self._index.get(turn.id)
        offset = self._journal.append({"id": turn.id, "reason": reason, "row": row})
        self._index[turn.id] = JournalEntry(offset, reason, 1 + (earlier.attempts if earlier else 0))
        if self._capture is not None and captured is not None:
            self._capture.keep(captured)
        self._report.generated += 1
        self._count(reading)
        chain.accept(reading)
        self._breaker.record(reading.reason, "" if reading.complete else (row["text"] or row["detail"])[-200:])
        return reading

    def _count(self, reading: TurnReading) -> None:
        if reading.complete:
            self._report.complete += 1
        else:
            self._report.by_reason[str(reading.reason)] += 1


def _replay(journal: Journal, entry: JournalEntry, chain: Chain) -> TurnReading:
    """What a chain needs to go on after a journaled turn; the record is read only if turns follow."""
    reason = Reason(entry.reason)
    if reason is not Reason.OK or chain.turn + 1 >= chain.num_planned:
        return TurnReading(reason=reason)
    row = journal.read_at(entry.offset)["row"]
    calls = json.loads(row["tool_calls"])
    return TurnReading(
        reason=reason,
        reasoning=row["reasoning"],
        content=row["content"],
        tool_calls=tuple(ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls),
    )
