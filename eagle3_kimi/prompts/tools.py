"""Tool declarations, calls and results of a row, in OpenAI's shape with Kimi's ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eagle3_kimi.prompts.verdicts import Refusal, Repair, RowRefused

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""Function name -> its parameters' JSON schema."""

_KEEPS_NULL = frozenset({"default", "const", "enum", "examples"})


def read_tools(raw: Any, repairs: list[Repair]) -> list[dict[str, Any]]:
    """Tool declarations (a list or its JSON text; bare functions are wrapped).

    Nulls go: a data set that keeps tools in one table fills each tool with the other tools' parameters.
    """
    tools = _parsed(raw, "tools", Refusal.INVALID_TOOLS)
    tools = [tools] if isinstance(tools, Mapping) else tools
    if not isinstance(tools, list):
        raise RowRefused(Refusal.INVALID_TOOLS, f"tools: expected a list, came {type(tools).__name__}")
    declared = []
    for index, tool in enumerate(tools):
        tool = _parsed(tool, f"tools[{index}]", Refusal.INVALID_TOOLS)
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowRefused(Refusal.INVALID_TOOLS, f"tools[{index}]: expected a function with a name")
        function = {key: value for key, value in function.items() if (key, value) != ("type", "function")}
        parameters = _parsed(function.get("parameters"), f"tools[{index}].parameters", Refusal.INVALID_TOOLS)
        if parameters is not None:
            if not isinstance(parameters, Mapping):
                raise RowRefused(Refusal.INVALID_TOOLS, f"tools[{index}].parameters: expected an object")
            function["parameters"] = parameters
        cleaned = _without_nulls(function)
        if cleaned != function:
            repairs.append(Repair.FILLER_NULLS_DROPPED)
        declared.append({"type": "function", "function": cleaned})
    return declared


def schemas_of(tools: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters' schema of each declared function."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def read_tool_calls(raw: Any, where: str, schemas: ToolSchemas, repairs: list[Repair]) -> list[dict[str, Any]]:
    """Tool calls as `{id, type, function {name, arguments}}`; `id` is None where the row has none.

    Args:
        raw: a list, one call, or their JSON text; a call may be flat (`{name, arguments}`).

    Raises:
        RowRefused: no name, or arguments that are no JSON object.
    """
    calls = _parsed(raw, where, Refusal.INVALID_TOOL_CALL)
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list):
        raise RowRefused(Refusal.INVALID_TOOL_CALL, f"{where}: expected a list of calls, came {type(calls).__name__}")
    read = []
    for index, call in enumerate(calls):
        at = f"{where}[{index}]"
        call = _parsed(call, at, Refusal.INVALID_TOOL_CALL)
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name.strip():
            raise RowRefused(Refusal.INVALID_TOOL_CALL, f"{at}: expected a function with a name, came {str(call)[:60]}")
        arguments = function.get("arguments", function.get("parameters"))
        text = _read_arguments(arguments, f"{at}.arguments", schemas.get(name), repairs)
        read.append(
            {"id": read_call_id(call.get("id")), "type": "function", "function": {"name": name, "arguments": text}}
        )
    return read


def read_call_id(raw: Any) -> str | None:
    """An id as text; None where there is none."""
    return str(raw) if isinstance(raw, str | int) and str(raw).strip() else None


def _read_arguments(raw: Any, where: str, schema: Mapping[str, Any] | None, repairs: list[Repair]) -> str:
    """Arguments as the text of one JSON object. Text that already is one stays as it was written."""
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        repairs.append(Repair.EMPTY_ARGUMENTS_FILLED)
        return "{}"
    if isinstance(raw, str):
        value = _parsed(raw, where, Refusal.INVALID_TOOL_ARGUMENTS)
        if isinstance(value, str):
            repairs.append(Repair.ARGUMENTS_DECODED_ONCE)
            raw, value = value, _parsed(value, where, Refusal.INVALID_TOOL_ARGUMENTS)
        if isinstance(value, Mapping):
            return str(raw)
    elif isinstance(raw, Mapping):
        value = raw
        kept = _without_filler(raw, where, schema)
        if kept != raw:
            repairs.append(Repair.FILLER_NULLS_DROPPED)
        return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
    else:
        value = raw
    raise RowRefused(
        Refusal.INVALID_TOOL_ARGUMENTS,
        f"{where}: expected a JSON object, came {type(value).__name__} {str(value)[:40]!r}",
    )


def _without_filler(value: Mapping[str, Any], where: str, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Drops nulls under keys the function does not declare: a table of several tools' arguments makes those."""
    properties = (schema or {}).get("properties")
    declared: Mapping[str, Any] | None = properties if isinstance(properties, Mapping) else None
    kept: dict[str, Any] = {}
    for key, item in value.items():
        if item is None and declared is None:
            raise RowRefused(
                Refusal.AMBIGUOUS_NULL_ARGUMENT,
                f"{where}.{key}: null, and the function's parameters are not declared: a value, or a table's filler?",
            )
        if item is None and declared is not None and key not in declared:
            continue
        inner = declared.get(key) if declared else None
        if isinstance(item, Mapping) and isinstance(inner, Mapping) and "properties" in inner:
            item = _without_filler(item, f"{where}.{key}", inner)
        kept[key] = item
    return kept


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            k: v if k in _KEEPS_NULL else _without_nulls(v)
            for k, v in value.items()
            if v is not None or k in _KEEPS_NULL
        }
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(raw: Any, where: str, reason: Refusal) -> Any:
    """JSON text -> its value; anything else as it is."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RowRefused(reason, f"{where}: not JSON ({error})") from error
