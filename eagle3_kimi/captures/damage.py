"""Damage that text itself shows: surrogates, replacement characters, runaway repetition."""

from __future__ import annotations

MIN_RUN = 64
"""Characters: shorter repetition is a person's (a rule of dashes, `ha ha`)."""
LONG_RUN = 1024
"""Characters: such a run is a fault wherever it stands (about 256 tokens)."""
_ANCHOR, _MAX_PERIOD, _TRIES = 12, 512, 4


def join_surrogates(text: str) -> str | None:
    """Joins surrogate halves that were split over two pieces; None where one half is missing."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return None


def has_surrogates(text: str) -> bool:
    """True when `text` cannot be written as UTF-8."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def is_degenerate_text(text: str) -> bool:
    """True when a cycle of at most 512 characters runs away.

    The run is long in itself, or it is at least half of the text; and it repeats often: 16 times, or 5 times
    where the cycle is a phrase (16 characters and more). A run that long holds one of a few anchors; an anchor
    that comes again p characters later gives the period, and the run is measured around it.
    """
    text = text.strip()
    shortest = max(MIN_RUN, min((len(text) + 1) // 2, LONG_RUN))
    for position in range(0, len(text) - shortest // 2, shortest // 2):
        anchor, again = text[position : position + _ANCHOR], position
        for _ in range(_TRIES):  # an anchor may come twice within one period
            again = text.find(anchor, again + 1, position + _MAX_PERIOD + _ANCHOR)
            if again < 0:
                break
            period = again - position
            run = _run_length(text, position, period)
            if run >= shortest and run // period >= (16 if period < 16 else 5):
                return True
    return False


def _run_length(text: str, position: int, period: int) -> int:
    """Length of the range around `position` in which every character equals the one `period` before it."""
    start = position
    while start > 0 and text[start - 1] == text[start - 1 + period]:
        start -= 1
    step, end = 256, position + period
    while end < len(text) and step:
        piece = text[end : end + step]
        if piece == text[end - period : end - period + len(piece)]:
            end += len(piece)
        else:
            step //= 2
    return end - start
