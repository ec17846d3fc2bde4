"""Whether token ids run in a circle: an answer that repeats itself until it is cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def is_degenerate(ids: Sequence[int], *, max_period: int = 32, min_run: int = 256, min_repeats: int = 16) -> bool:
    """True when a cycle of at most `max_period` tokens runs away.

    Either the cycle goes on for `min_run` tokens, or it repeats `min_repeats` times and that is at
    least half of `ids`. A cycle of period p is a run of positions where `ids[i] == ids[i - p]`.
    """
    total = len(ids)
    shortest = min(min_run, max(min_repeats, (total + 1) // 2))  # no cycle that counts is shorter
    if not _repeats_somewhere(ids, shortest, max_period):
        return False
    tokens = np.asarray(ids, dtype=np.int64)
    for period in range(1, max_period + 1):
        if total < min(period * min_repeats, max(min_run, 4 * period)):
            return False
        same = tokens[period:] == tokens[:-period]
        if np.count_nonzero(same) + period < shortest:
            continue
        breaks = np.flatnonzero(~same)
        edges = np.concatenate(([-1], breaks, [len(same)]))
        run = int(np.diff(edges).max()) - 1 + period
        if run >= min_run and run >= 4 * period:
            return True
        if run >= period * min_repeats and 2 * run >= total:
            return True
    return False


def _repeats_somewhere(ids: Sequence[int], run: int, max_distinct: int) -> bool:
    """False when no `run` ids in a row can have `max_distinct` values or fewer: the quick no for usual text.

    Any `run` positions hold a whole block of `(run + 1) // 2` that starts at a multiple of its length.
    """
    block = (run + 1) // 2
    if block <= max_distinct:
        return True
    return any(len(set(ids[start : start + block])) <= max_distinct for start in range(0, len(ids) - block + 1, block))
