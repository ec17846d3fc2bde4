"""Orders that depend on a seed and on nothing else: not on processes, machines or hash randomisation."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def shuffled(items: Iterable[T], *, seed: int, buffer_size: int = 10_000) -> Iterator[T]:
    """A shuffle of a stream in flat memory: each item waits in a buffer for its turn.

    Complete where the stream fits into the buffer; beyond that an item moves at most freely backwards.
    """
    generator = random.Random(seed)
    buffer: list[T] = []
    for item in items:
        if len(buffer) < buffer_size:
            buffer.append(item)
            continue
        index = generator.randrange(buffer_size)
        yield buffer[index]
        buffer[index] = item
    generator.shuffle(buffer)
    yield from buffer


def order_key(seed: int, key: str) -> bytes:
    """Sorting by this is a seeded shuffle."""
    return hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=16).digest()


def share_out(size: int, weights: dict[str, float]) -> dict[str, int]:
    """Splits `size` by weight so that the parts add up (largest remainder; ties by name)."""
    total = sum(weights.values())
    if total <= 0:
        return dict.fromkeys(weights, 0)
    exact = {name: size * weight / total for name, weight in weights.items()}
    parts = {name: int(value) for name, value in exact.items()}
    left = sorted(exact, key=lambda name: (parts[name] - exact[name], name))
    for name in left[: size - sum(parts.values())]:
        parts[name] += 1
    return parts
