"""Markers inside text: where the thoughts end, where tool calls begin, what must not be there.

Text is split only where there is one reading: exactly one closing tag outside closed Markdown code and no
other marker left. A tool section ends the thoughts as well; no closing tag is invented for it.

    r r r </think> a a a                     prompt opened the thoughts
    <think> r r r </think> a a <section>     the model repeated the opening, or opened them itself
    r r r <section>                          the tool section ends the thoughts
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eagle3_kimi.captures.context import TRAILING_ENDS, TextMarkers
from eagle3_kimi.captures.markdown import find_closed_code
from eagle3_kimi.captures.tools import parse_tool_section
from eagle3_kimi.captures.verdicts import Fault, Refused, Repair
from eagle3_kimi.protocol import Reason, is_blank


class FoundMarker(NamedTuple):
    """A marker outside closed code."""

    kind: str
    start: int
    end: int


@dataclass(slots=True)
class Pieces:
    """A turn taken apart."""

    reasoning: str
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)


def find_markers(text: str, markers: TextMarkers) -> list[FoundMarker]:
    """Markers outside closed code, up to the first tool marker: from there on the tool grammar reads."""
    code, found = find_closed_code(text), []
    for match in markers.pattern.finditer(text):
        if any(start <= match.start() < end for start, end in code):
            continue
        kind = markers.names[match.group()]
        found.append(FoundMarker(kind, match.start(), match.end()))
        if kind == "tool":
            break
    return found


def split_raw(text: str, markers: TextMarkers, *, opened: bool, parsed: bool = False) -> Pieces:
    """Splits what the model wrote into reasoning, answer and tool calls.

    Args:
        text: all that the model wrote.
        markers: the family's markers.
        opened: the prompt opened the thoughts.
        parsed: the server took tool calls out of the text.

    Raises:
        Refused: no boundary, or more than one reading.
    """
    found = find_markers(text, markers)
    inline = bool(found) and found[0].kind == "opening" and is_blank(text[: found[0].start])
    start = found.pop(0).end if inline else 0
    kinds = [marker.kind for marker in found]
    if "opening" in kinds:
        raise Refused(Reason.MULTIPLE_THINK_BLOCKS, f"{markers.opening} where no thoughts can begin")
    if kinds.count("closing") > 1:
        raise Refused(Reason.MULTIPLE_THINK_BLOCKS, f"{markers.closing} {kinds.count('closing')} times outside code")
    if not inline and not opened:
        if "closing" in kinds:
            raise Refused(
                Reason.THOUGHTS_NOT_OPENED, f"{markers.closing}, but neither prompt nor text opens the thoughts"
            )
        raise Refused(Fault.MISSING_REASONING, "neither the prompt nor the text opens any thoughts")
    boundary = next((m for m in found if m.kind in {"closing", "tool"}), None)
    if boundary is None:
        if inline and parsed and not found:  # the tool section that ended the thoughts was taken out
            return Pieces(reasoning=text[start:], repairs=[Repair.SPLIT_INLINE_THINK])
        if inline:
            raise Refused(Reason.UNCLOSED_THOUGHTS, f"{markers.opening} without {markers.closing}")
        raise Refused(Fault.MISSING_REASONING, f"no {markers.closing}: nothing shows where thoughts end")
    if boundary is not found[0]:
        raise _misplaced(text, found[0])
    pieces = Pieces(reasoning=text[start : boundary.start])
    if boundary.kind == "closing":
        pieces.repairs.append(Repair.SPLIT_INLINE_THINK if inline else Repair.SPLIT_PREFILLED_THINK)
        read_answer(text[boundary.end :], markers, pieces, parsed=parsed)
    else:
        read_answer(text[boundary.start :], markers, pieces, parsed=parsed)
        pieces.repairs[0] = Repair.TOOL_SECTION_CUT_FROM_REASONING
    return pieces


def read_answer(text: str, markers: TextMarkers, pieces: Pieces, *, parsed: bool = False) -> None:
    """Reads the text after the thoughts into `pieces`: content, tool section, end of turn.

    Raises:
        Refused: any other marker outside closed code, or text after the tool section.
    """
    if not markers.may_be_in(text):
        pieces.content = text
        return
    found = find_markers(text, markers)
    if found and found[0].kind == "tool":
        pieces.content = text[: found[0].start]
        pieces.tool_calls, end = parse_tool_section(text, found[0].start, parsed=parsed)
        pieces.repairs.append(Repair.TOOL_SECTION_PARSED_FROM_CONTENT)
        if not is_blank(_without_end(text[end:], markers, pieces)):
            raise Refused(Reason.TEXT_AFTER_TOOL_SECTION, f"text after the tool section: {text[end:][:60]!r}")
        return
    pieces.content = _without_end(text, markers, pieces)
    if found and found[0].start < len(pieces.content):
        raise _misplaced(text, found[0])


def _without_end(text: str, markers: TextMarkers, pieces: Pieces) -> str:
    """Drops one end of turn, where it is the last thing in the text."""
    body = text.rstrip()
    for ending in (*markers.ends, *TRAILING_ENDS):
        if body.endswith(ending):
            pieces.repairs.append(Repair.STRIPPED_END_OF_TURN)
            return body[: -len(ending)]
    return text


def _misplaced(text: str, marker: FoundMarker) -> Refused:
    where = f"{text[marker.start : marker.end]} at character {marker.start}"
    if marker.kind in {"opening", "closing"}:
        return Refused(Fault.RESIDUAL_THINK_MARKER, f"{where}: a second boundary, or text about one? Two readings")
    if marker.kind == "end":
        return Refused(Reason.END_OF_TURN_INSIDE, f"the turn goes on after {where}")
    if marker.kind == "foreign":
        return Refused(Reason.FOREIGN_CONTROL_TOKEN, f"{where} does not belong in an assistant turn")
    return Refused(Reason.INVALID_TOOL_SECTION, f"{where} has no place there")


def tidy_parsed(reasoning: str, content: str, markers: TextMarkers, *, parsed: bool = False) -> Pieces:
    """Reads a turn whose reasoning came in a field of its own; both texts may still hold markers.

    Raises:
        Refused: a marker that has more than one reading.
    """
    reasoning, content, repairs = _join_halved_tag(reasoning, content, markers)
    found = find_markers(reasoning, markers) if markers.may_be_in(reasoning) else []
    start, end = 0, len(reasoning)
    if found and found[0].kind == "opening" and is_blank(reasoning[: found[0].start]):
        start = found.pop(0).end
    if found and found[0].kind == "closing" and is_blank(reasoning[found[0].end :]):
        end = found.pop(0).start
    if (start, end) != (0, len(reasoning)):
        repairs.append(Repair.STRIPPED_THINK_TAGS)
    if found and not is_blank(content):
        raise _misplaced(reasoning, found[0])
    if found:  # the field holds all that the model wrote
        pieces = split_raw(reasoning[start:end], markers, opened=True, parsed=parsed)
        if pieces.repairs[0] is Repair.SPLIT_PREFILLED_THINK:
            pieces.repairs[0] = Repair.SPLIT_REASONING_FIELD
        pieces.repairs.extend(repairs)
        return pieces
    pieces = Pieces(reasoning=reasoning[start:end], repairs=repairs)
    if markers.may_be_in(content):
        _tidy_content(pieces, content, markers, parsed=parsed)
    else:
        pieces.content = content
    return pieces


def _tidy_content(pieces: Pieces, content: str, markers: TextMarkers, *, parsed: bool) -> None:
    found = find_markers(content, markers)
    closing = next((m for m in found if m.kind == "closing"), None)
    if closing is not None:
        before = content[: closing.start].strip().removeprefix(markers.opening)
        if is_blank(content[: closing.start]) or before.strip() == pieces.reasoning.strip():
            # the boundary was left in the content, alone or with a copy of the thoughts before it
            pieces.repairs.append(Repair.STRIPPED_THINK_TAGS)
            content = content[closing.end :]
        elif found[0] is closing:
            raise Refused(
                Fault.AMBIGUOUS_SPLIT,
                f"reasoning in its field, {markers.closing} in the content: thoughts cut in two, or text about a tag?",
            )
    read_answer(content, markers, pieces, parsed=parsed)


def _join_halved_tag(reasoning: str, content: str, markers: TextMarkers) -> tuple[str, str, list[Repair]]:
    """Joins a closing tag whose first half a streaming parser left in the reasoning."""
    tag = markers.closing
    if tag[0] not in reasoning[-len(tag) :] or reasoning.rstrip().endswith(tag):
        if content.startswith((tag[1:], tag[2:])):
            raise Refused(Fault.RESIDUAL_THINK_MARKER, f"the content begins with part of {tag}")
        return reasoning, content, []
    for size in range(len(tag) - 1, 0, -1):
        if reasoning.endswith(tag[:size]):
            if content.startswith(tag[size:]):
                return reasoning[:-size], content[len(tag) - size :], [Repair.STRIPPED_THINK_TAGS]
            if size > 2:
                raise Refused(Fault.RESIDUAL_THINK_MARKER, f"the reasoning ends in {tag[:size]}, part of {tag}")
    return reasoning, content, []
