"""Thoughts inside an answer's text: split where there is one reading, refuse where there are two."""

from __future__ import annotations

import re

from eagle3_kimi.captures.markdown import find_closed_code
from eagle3_kimi.prompts.verdicts import Refusal, Repair, RowRefused

THINK_START, THINK_END = "<think>", "</think>"
END_OF_TURN = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "[EOS]", "</s>")
"""What a raw completion may end in; dropped there, since it says nothing about the text."""

_MARKER = re.compile(r"</?think>|<\|(?:im_\w+|tool_call\w*|media_\w+)\|>|<｜[^｜\n]{1,40}｜>")


def split_thoughts(text: str, where: str, repairs: list[Repair]) -> tuple[str, str]:
    """Splits `reasoning</think>answer`, with or without the opening tag.

    Markers inside closed Markdown code are text: an answer may speak about them.

    Returns:
        reasoning and answer; the reasoning is empty, and the answer untouched, where there are no tags.

    Raises:
        RowRefused: more than one closing tag, an opening tag elsewhere, or another control token.
    """
    if "<" not in text and "[EOS]" not in text:
        return "", text
    text = _without_end_of_turn(text, repairs)
    code = find_closed_code(text)
    markers = [m for m in _MARKER.finditer(text) if not any(start <= m.start() < end for start, end in code)]
    for marker in markers:
        if marker.group() not in {THINK_START, THINK_END}:
            raise RowRefused(
                Refusal.CONTROL_TOKEN_IN_ANSWER, f"{where}: {marker.group()} at character {marker.start()} of an answer"
            )
    if not markers:
        return "", text
    tags, start = [marker.group() for marker in markers], 0
    if tags[0] == THINK_START and not text[: markers[0].start()].strip():
        start = markers.pop(0).end()
    if [marker.group() for marker in markers] != [THINK_END]:
        raise RowRefused(
            Refusal.AMBIGUOUS_THOUGHTS,
            f"{where}: expected one {THINK_END}, and {THINK_START} only at the start; came {' '.join(tags)}",
        )
    repairs.append(Repair.THOUGHTS_SPLIT)
    return text[start : markers[0].start()].strip(), text[markers[0].end() :].strip()


def _without_end_of_turn(text: str, repairs: list[Repair]) -> str:
    body = text.rstrip()
    for ending in END_OF_TURN:
        if body.endswith(ending):
            repairs.append(Repair.END_OF_TURN_DROPPED)
            return body.removesuffix(ending)
    return text
