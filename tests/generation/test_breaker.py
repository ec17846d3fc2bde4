from __future__ import annotations

import pytest

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.generation.breaker import CircuitBreaker
from eagle3_kimi.protocol import Reason


def feed(breaker: CircuitBreaker, *reasons: Reason) -> None:
    for number, reason in enumerate(reasons):
        breaker.record(reason, f"text {number}")


def test_truncations_and_other_faults_have_limits_of_their_own() -> None:
    half_cut = [Reason.OK, Reason.FINISH_LENGTH] * 5
    feed(CircuitBreaker(window=10, max_truncated=0.5, max_incomplete=0.1), *half_cut)
    with pytest.raises(RunStopped, match="5 of the last 10 samples are truncated, more than the limit of 40%"):
        feed(CircuitBreaker(window=10, max_truncated=0.4, max_incomplete=0.9), *half_cut)
    half_blank = [Reason.OK, Reason.BLANK_REASONING] * 5
    with pytest.raises(RunStopped, match="5 of the last 10 samples are incomplete, more than the limit of 40%"):
        feed(CircuitBreaker(window=10, max_truncated=0.9, max_incomplete=0.4), *half_blank)


def test_it_waits_for_a_full_window() -> None:
    breaker = CircuitBreaker(window=10, max_truncated=0.0, max_incomplete=0.0)
    feed(breaker, *[Reason.BLANK_REASONING] * 9)
    with pytest.raises(RunStopped):
        breaker.record(Reason.BLANK_REASONING, "the tenth")


def test_old_faults_leave_the_window() -> None:
    breaker = CircuitBreaker(window=10, max_truncated=0.2, max_incomplete=0.2)
    for _ in range(5):  # 2 in any 10: at the limit, not above it
        feed(breaker, *[Reason.NO_END_OF_TURN] * 2, *[Reason.OK] * 8)
    with pytest.raises(RunStopped):
        feed(breaker, *[Reason.OK] * 2, *[Reason.NO_END_OF_TURN] * 3)


def test_the_message_is_a_table_with_two_examples_of_the_worst() -> None:
    breaker = CircuitBreaker(window=4, max_truncated=0.0, max_incomplete=0.5)
    reasons = (Reason.BLANK_REASONING, Reason.BLANK_REASONING, Reason.UNCLOSED_THOUGHTS, Reason.BLANK_REASONING)
    with pytest.raises(RunStopped) as caught:
        feed(breaker, *reasons)
    message = str(caught.value)
    assert "blank_reasoning                   3  the model closes its thoughts at once" in message
    assert "unclosed_thoughts                 1" in message
    assert "example 1 (blank_reasoning): text 1" in message
    assert "example 2 (blank_reasoning): text 3" in message
    assert "example 3" not in message


def test_a_short_run_is_judged_at_its_end() -> None:
    breaker = CircuitBreaker(window=200, max_truncated=0.5, max_incomplete=0.2)
    for index in range(25):
        breaker.record(Reason.BLANK_REASONING if index % 4 == 0 else Reason.OK, "</think>")
    with pytest.raises(RunStopped, match="7 of the last 25 samples are incomplete"):
        breaker.finish()


def test_a_handful_of_samples_is_no_share() -> None:
    breaker = CircuitBreaker(window=200, max_truncated=0.5, max_incomplete=0.2)
    for _ in range(19):
        breaker.record(Reason.BLANK_REASONING, "</think>")
    breaker.finish()
