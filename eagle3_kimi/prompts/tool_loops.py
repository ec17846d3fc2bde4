"""Calls and their results: each result finds its call, in the calls' order, under Kimi's ids.

assistant calls f:0 g:1     assistant calls f:0 g:1
tool      g:1          ->   tool      f:0                results stand in the order of their calls,
tool      f:0               tool      g:1                since a template may label them by order
"""

from __future__ import annotations

import re
from typing import Any

from eagle3_kimi.prompts.turns import Turn
from eagle3_kimi.prompts.verdicts import Refusal, Repair, RowRefused

_KIMI_ID = re.compile(r"functions\.(?P<name>.+):(?P<index>\d+)")


def match_results(turns: list[Turn], repairs: list[Repair]) -> list[Turn]:
    """Pairs results with calls and puts them in order; renumbers ids that hide the function's name.

    Raises:
        RowRefused: a result without a call, a call without a result.
    """
    matched: list[Turn] = []
    pairs: list[tuple[dict[str, Any], Turn]] = []
    position = 0
    while position < len(turns):
        turn = turns[position]
        position += 1
        if turn.role == "tool":
            raise _orphan(turn, position - 1)
        matched.append(turn)
        if not turn.calls:
            continue
        results: dict[int, Turn] = {}  # call's position -> its result, in the row's order
        while position < len(turns) and turns[position].role == "tool":
            results[_find_call(turn.calls, results, turns[position], position)] = turns[position]
            position += 1
        if len(results) < len(turn.calls) and (results or position < len(turns)):
            missing = next(c for i, c in enumerate(turn.calls) if i not in results)
            raise RowRefused(
                Refusal.MISSING_TOOL_RESULT,
                f"messages[{position}]: no result for the call of {_name(missing)} before it",
            )
        if list(results) != sorted(results):
            repairs.append(Repair.TOOL_RESULTS_REORDERED)
        matched += [results[index] for index in sorted(results)]
        pairs += [(turn.calls[index], result) for index, result in results.items()]
    _number(matched, repairs)
    for call, result in pairs:
        result.result_id = call["id"]
    return matched


def _find_call(calls: list[dict[str, Any]], taken: dict[int, Turn], result: Turn, position: int) -> int:
    """By id; without one, by the function's name; without that, the next call in order."""
    free = [index for index in range(len(calls)) if index not in taken]
    if result.result_id:
        free = [i for i in free if calls[i]["id"] == result.result_id]
    elif result.result_name:
        free = [i for i in free if _name(calls[i]) == result.result_name]
    if not free:
        raise _orphan(result, position)
    return free[0]


def _number(turns: list[Turn], repairs: list[Repair]) -> None:
    """`functions.NAME:IDX`, IDX over the conversation, unless every id already is one of its function's."""
    calls = [call for turn in turns for call in turn.calls]
    for turn in turns:
        ids = [call["id"] for call in turn.calls]
        if len(set(ids)) < len(ids) or any(_kimi_name(call["id"]) != _name(call) for call in turn.calls):
            break
    else:
        return
    if not all(turn.is_call_turn for turn in turns if turn.calls):  # call turns have no ids to begin with
        repairs.append(Repair.TOOL_CALL_IDS_RENUMBERED)
    for index, call in enumerate(calls):
        call["id"] = f"functions.{_name(call)}:{index}"


def _kimi_name(call_id: Any) -> str | None:
    match = _KIMI_ID.fullmatch(call_id) if isinstance(call_id, str) else None
    return match["name"] if match else None


def _name(call: dict[str, Any]) -> str:
    return str(call["function"]["name"])


def _orphan(result: Turn, position: int) -> RowRefused:
    named = result.result_id or result.result_name or "no id"
    return RowRefused(
        Refusal.ORPHAN_TOOL_RESULT, f"messages[{position}]: a tool result ({named}) without a call for it"
    )
