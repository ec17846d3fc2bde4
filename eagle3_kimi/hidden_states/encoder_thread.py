"""Captured states are encoded beside the engine that makes the next ones: some together, in a thread, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

from eagle3_kimi.hidden_states.encode import Captured, Encoded
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.hidden_states.sink import CapturedStates

_TOKENS_AT_ONCE = 512
"""Encoded together: enough that starting operations costs little, few beside what a forward pass leaves waiting."""


class Encoder(Protocol):
    """Encodes captured states: `FeatureEncoder`, or what helps another rank's."""

    def encode(self, captured: Sequence[Captured]) -> list[Encoded]:
        """See `FeatureEncoder.encode`."""
        ...


class EncoderThread:
    """A thread that encodes. Use as a context manager: what nobody has taken at its end is dropped.

    Args:
        encoder: what it runs.
        most_tokens: tokens whose states may wait; some hundred more wait for their turn to be put together.
    """

    def __init__(self, encoder: Encoder, *, most_tokens: int) -> None:
        self._encoder, self._most_batches = encoder, most_tokens // _TOKENS_AT_ONCE
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")
        self._batch: list[Captured] = []
        self._batch_tokens = 0
        self._waiting: deque[Future[list[Encoded]]] = deque()

    def put(self, sample: Sample, states: CapturedStates) -> None:
        """Takes a sample's states over; returns at once."""
        self._batch.append((sample, states))
        self._batch_tokens += len(states.token_ids)
        if self._batch_tokens >= _TOKENS_AT_ONCE:
            self._submit()

    def take(self) -> Iterator[Encoded]:
        """What must be taken before more is put: all but the newest. Waits for it."""
        while len(self._waiting) > self._most_batches:
            yield from self._waiting.popleft().result()

    def drain(self) -> Iterator[Encoded]:
        """All that was put."""
        self._submit()
        while self._waiting:
            yield from self._waiting.popleft().result()

    def __enter__(self) -> EncoderThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        if self._batch:
            self._waiting.append(self._thread.submit(self._encoder.encode, self._batch))
            self._batch, self._batch_tokens = [], 0
