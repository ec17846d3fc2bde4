"""Closed Markdown code: where a marker is text that the model wrote about markers."""

from __future__ import annotations

import re

_RUN = re.compile(r"`+|(?<![^\n])[ ]{0,3}~{3,}")
_INFO_STRING = re.compile(r"\w")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


def find_closed_code(text: str) -> list[tuple[int, int]]:
    """Ranges of closed code spans and fences, left to right.

    An opening run without its closing run hides nothing: thoughts often break off inside a fence.
    A run of three or more is a fence wherever it stands, since models open them in mid-line.

        Try ```python\\nx = 1\\nstop.</think>      no closing run: not code
        Use `</think>` here                     (4, 14)
    """
    if "`" not in text and "~~~" not in text:
        return []
    runs = [(m.start(), m.end()) for m in _RUN.finditer(text)]
    regions, index = [], 0
    while index < len(runs):
        closing = _find_closing(text, runs, index)
        if closing is None:
            index += 1
        else:
            regions.append((runs[index][0], runs[closing][1]))
            index = closing + 1
    return regions


def _find_closing(text: str, runs: list[tuple[int, int]], opening: int) -> int | None:
    start, end = runs[opening]
    marker = text[start:end].strip(" ")
    for index in range(opening + 1, len(runs)):
        run_start, run_end = runs[index]
        run = text[run_start:run_end].strip(" ")
        if len(marker) < 3:  # an inline span ends in a run of its own length, inside its paragraph
            if _BLANK_LINE.search(text, end, run_start):
                return None
            if run == marker:
                return index
        elif run[0] == marker[0] and len(run) >= len(marker) and not _opens_fence(text, run_start, run_end):
            return index
    return None


def _opens_fence(text: str, start: int, end: int) -> bool:
    """A fence line with an info string (```` ```xml ````) can only open."""
    line_start = text.rfind("\n", 0, start) + 1
    return not text[line_start:start].strip() and _INFO_STRING.match(text, end) is not None
