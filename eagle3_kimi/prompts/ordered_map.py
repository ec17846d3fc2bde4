"""A map over a stream in several processes: results in order, memory flat."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_BATCH = 256
_BATCHES_AHEAD = 4
"""For each process; what bounds the memory."""


def ordered_map(function: Callable[[A], B], items: Iterable[A], *, num_proc: int = 1) -> Iterator[B]:
    """`map(function, items)` in `num_proc` processes; nothing about the results shows how many there were.

    Processes are spawned, not forked: a fork after CUDA has started is broken.
    """
    if num_proc <= 1:
        yield from map(function, items)
        return
    stream = iter(items)
    waiting: deque[Future[list[B]]] = deque()
    pool = ProcessPoolExecutor(num_proc, mp_context=multiprocessing.get_context("spawn"))
    try:
        while True:
            while len(waiting) < _BATCHES_AHEAD * num_proc and (batch := list(islice(stream, _BATCH))):
                waiting.append(pool.submit(_map_batch, function, batch))
            if not waiting:
                return
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _map_batch(function: Callable[[A], B], batch: list[A]) -> list[B]:
    return [function(item) for item in batch]
