from __future__ import annotations

import random

import pytest

from eagle3_kimi.repetition import is_degenerate


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 256, True),  # a run of 256
        ([1, 2, 3] * 16, True),  # 16 repeats, all of it
        ([1, 2, 3] * 15, False),
        (list(range(100, 200)) + [1] * 16, False),  # 16 repeats, but a small part
        (list(range(100, 160)) + [1] * 70, True),  # more than half
        (list(range(20)) * 15, True),  # a run of 300, though only 15 repeats
        (list(range(40)) * 10, False),  # the cycle is too long to be called one
        (list(range(1000)), False),
        ([], False),
    ],
)
def test_is_degenerate(ids: list[int], expected: bool) -> None:
    assert is_degenerate(ids) is expected


def test_degeneration_against_a_naive_reference() -> None:
    def reference(ids: list[int]) -> bool:
        for period in range(1, 33):
            run = period
            for i in range(period, len(ids)):
                run = run + 1 if ids[i] == ids[i - period] else period
                if run >= 256 or (run >= 16 * period and 2 * run >= len(ids)):
                    return True
        return False

    rng = random.Random(2)
    told = [0, 0]
    for _ in range(300):
        vocabulary = rng.choice([2, 30, 33, 5000])
        cycle = rng.choices(range(vocabulary), k=rng.randint(1, 40))
        run = (cycle * 600)[: rng.choice([100, 255, 256, 257, 16 * len(cycle) - 1, 16 * len(cycle)])]
        around = [rng.choices(range(vocabulary), k=rng.choice([0, 3, 60, 700])) for _ in range(2)]
        ids = around[0] + run + around[1]
        assert is_degenerate(ids) == reference(ids), ids
        told[reference(ids)] += 1
    assert min(told) > 50
