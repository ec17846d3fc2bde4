"""Tool calls: the list a server parsed, and Kimi's tool section left in a text."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from eagle3_kimi.captures.context import ARGUMENTS_START, CALL_END, CALL_START, SECTION_ENDS, SECTION_STARTS
from eagle3_kimi.captures.verdicts import Fault, Refused, Repair
from eagle3_kimi.protocol import Reason


def _any_of(texts: tuple[str, ...]) -> str:
    return "(?:" + "|".join(map(re.escape, texts)) + ")"


_START = re.compile(rf"\s*{_any_of(SECTION_STARTS)}")
_END = re.compile(rf"\s*{_any_of(SECTION_ENDS)}")
_CALL = re.compile(
    rf"\s*{re.escape(CALL_START)}\s*(\S[^<|]*?)\s*{re.escape(ARGUMENTS_START)}\s*(.*?)\s*{re.escape(CALL_END)}",
    re.DOTALL,
)
_CALL_ID = re.compile(r"(?:functions\.)?([\w.\-/]+):\d+")


def parse_tool_section(text: str, start: int, *, parsed: bool = False) -> tuple[list[dict[str, Any]], int]:
    """Parses the tool section, or the bare calls, that begin at `start`.

    Args:
        text: what the model wrote.
        start: where the section's first marker stands.
        parsed: the server took the calls out; empty markers may be left.

    Returns:
        the calls and the index after the section.

    Raises:
        Refused: the section is not closed, is empty, or a call is malformed.
    """
    opened = _START.match(text, start)
    position = opened.end() if opened else start
    calls = []
    while match := _CALL.match(text, position):
        calls.append(_call_of(match[1], match[2]))
        position = match.end()
    closed = _END.match(text, position)
    if parsed and opened and not calls and (closed or not text[position:].strip()):
        return [], closed.end() if closed else position
    if not calls and closed:
        raise Refused(Reason.INVALID_TOOL_SECTION, "the tool section holds no call")
    if not calls or (opened and not closed):
        raise Refused(Reason.UNCLOSED_TOOL_SECTION, f"the tool section breaks off at character {position}")
    return calls, closed.end() if closed else position


def _call_of(call_id: str, arguments: str) -> dict[str, Any]:
    name = _CALL_ID.fullmatch(call_id)
    if name is None:
        raise Refused(Reason.INVALID_TOOL_SECTION, f"{call_id[:60]!r} is no call id of the form functions.NAME:IDX")
    if not isinstance(parse_json(arguments), dict):
        raise Refused(Reason.INVALID_TOOL_ARGUMENTS, f"the arguments of {name[1]} are not a JSON object")
    return {"id": call_id, "type": "function", "function": {"name": name[1], "arguments": arguments}}


def read_tool_calls(value: Any, repairs: list[Repair]) -> list[dict[str, Any]]:
    """The calls a server parsed, each with a name and arguments that are one JSON object's text.

    Raises:
        Refused: a call without a name, or arguments that are no JSON object.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refused(Fault.INVALID_TOOL_CALL, f"tool_calls: expected a list, came {type(value).__name__}")
    return [_checked(call, f"tool_calls[{index}]", repairs) for index, call in enumerate(value)]


def _checked(call: Any, where: str, repairs: list[Repair]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name.strip():
        raise Refused(Fault.INVALID_TOOL_CALL, f"{where}: expected a function with a name")
    if call.get("type", "function") not in ("function", None):
        raise Refused(Fault.INVALID_TOOL_CALL, f"{where}: a call of type {call['type']!r}; functions are understood")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    parsed = parse_json(arguments) if isinstance(arguments, str) else None
    if isinstance(parsed, str):
        arguments, parsed = parsed, parse_json(parsed)
        repairs.append(Repair.TOOL_ARGUMENTS_DECODED_ONCE)
    if not isinstance(parsed, dict):
        raise Refused(Reason.INVALID_TOOL_ARGUMENTS, f"{where}: the arguments of {name} are not a JSON object")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def check_declared(calls: list[dict[str, Any]], tools: Any) -> None:
    """Raises where the request declared its tools and a call names none of them."""
    if not isinstance(tools, list) or not tools:
        return
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = {function.get("name") for function in functions if isinstance(function, dict)}
    for call in calls:
        if call["function"]["name"] not in names:
            raise Refused(Fault.UNKNOWN_TOOL, f"{call['function']['name']} is not one of the declared tools")


def same_calls(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    """True where both name the same functions with the same arguments, in order."""

    def meaning(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        return [(c["function"]["name"], parse_json(c["function"]["arguments"])) for c in calls]

    return meaning(left) == meaning(right)


def parse_json(text: str) -> Any:
    """The value of strict JSON text (no NaN), or None."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
