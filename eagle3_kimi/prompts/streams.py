"""Streams that are larger than memory: shuffled by a seed, mapped over in several processes, in order."""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Self, TypeVar

A = TypeVar("A")
B = TypeVar("B")

_BATCH = 256
_BATCHES_AHEAD = 4
"""For each process; what bounds the memory."""


def shuffled(items: Iterable[A], *, seed: int, buffer_size: int = 10_000) -> Iterator[A]:
    """A shuffle of a stream in flat memory: each item waits in a buffer for its turn.

    Complete where the stream fits into the buffer; beyond that an item moves at most freely backwards.
    """
    generator = random.Random(seed)
    buffer: list[A] = []
    for item in items:
        if len(buffer) < buffer_size:
            buffer.append(item)
            continue
        index = generator.randrange(buffer_size)
        yield buffer[index]
        buffer[index] = item
    generator.shuffle(buffer)
    yield from buffer


class OrderedPool:
    """`map` in `num_proc` processes; nothing about the results shows how many there were.

    Processes are spawned, not forked: a fork after CUDA has started is broken. One pool serves many maps, so
    that each process imports, and opens a tokenizer, once.
    """

    def __init__(self, num_proc: int = 1) -> None:
        self.num_proc = max(1, num_proc)
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self.num_proc > 1:
            self._executor = ProcessPoolExecutor(self.num_proc, mp_context=multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def map(self, function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
        """Results in order. `function` and items are pickled; no more is read ahead than keeps the processes busy."""
        if self._executor is None:
            yield from map(function, items)
            return
        stream = iter(items)
        waiting: deque[Future[list[B]]] = deque()
        try:
            while True:
                while len(waiting) < _BATCHES_AHEAD * self.num_proc and (batch := list(islice(stream, _BATCH))):
                    waiting.append(self._executor.submit(_map_batch, function, batch))
                if not waiting:
                    return
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _map_batch(function: Callable[[A], B], batch: list[A]) -> list[B]:
    return [function(item) for item in batch]
