"""Checks one case of kind `capture`: a captured response, batch or raw file -> its verdict."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from eagle3_kimi.captures import CaptureVerdict, judge, judge_file, judge_records
from eagle3_kimi.captures.verdicts import worst


def check(case: dict[str, Any]) -> str | None:
    """None when the case passes, else one line that says what differs. Reason names are not compared."""
    given, context, expect = case["input"], case.get("context"), case["expect"]
    if isinstance(given, dict) and "bytes_b64" in given:
        file = judge_file(base64.b64decode(given["bytes_b64"]), context)
    elif isinstance(given, dict) and "records" in given:
        file = judge_records(given["records"], given.get("prompts"), context)
    else:
        return _compare_choices(judge(given, context), expect)
    choices = [verdict for row in file.rows if not row.dropped for verdict in row.verdicts]
    texts = {name: expect[name] for name in ("reasoning", "content", "samples") if expect.get(name) is not None}
    came: dict[str, Any] = {"verdict": file.verdict, "kept": file.kept, "dropped": file.dropped, "line": file.line}
    if isinstance(expect.get("kept"), int):
        came["kept"] = len(file.kept)
    return _differences(came, expect, f"{file.reason} {file.detail}") or _compare_texts(choices, texts)


def _compare_choices(verdicts: Sequence[CaptureVerdict], expect: dict[str, Any]) -> str | None:
    outcome = worst(verdict.verdict for verdict in verdicts)
    why = ", ".join(f"{verdict.reason} {verdict.detail}".strip() for verdict in verdicts)
    return _differences({"verdict": outcome}, expect, why) or _compare_texts(verdicts, expect)


def _compare_texts(verdicts: Sequence[CaptureVerdict], expect: dict[str, Any]) -> str | None:
    """Texts and calls of the one choice, and those of `samples` choice by choice."""
    if len(verdicts) == 1:
        difference = _differences(_texts_of(verdicts[0]), expect, str(verdicts[0].reason))
        if difference:
            return difference
    by_index = {verdict.choice_index: verdict for verdict in verdicts}
    for position, sample in enumerate(expect.get("samples", ())):
        index = sample.get("choice_index", position)
        if index not in by_index:
            return f"samples: no choice {index}; came {sorted(by_index)}"
        difference = _differences(_texts_of(by_index[index]), sample, str(by_index[index].reason))
        if difference:
            return f"choice {index}: {difference}"
    return None


def _texts_of(verdict: CaptureVerdict) -> dict[str, Any]:
    return {
        "verdict": verdict.verdict,
        "reasoning": verdict.reasoning,
        "content": verdict.content,
        "tool_calls": [_meaning_of(call) for call in verdict.tool_calls],
        "finish_reason": verdict.finish_reason,
        "token_exact": verdict.token_exact,
    }


def _differences(came: dict[str, Any], expect: dict[str, Any], why: str) -> str | None:
    for name, value in came.items():
        if name not in expect:
            continue
        wanted = expect[name]
        if name == "tool_calls":
            wanted = [_meaning_of(call) for call in wanted or []]
        elif isinstance(wanted, str):
            wanted = wanted.strip()
        if value != wanted:
            return f"{name}: expected {wanted!r} ({expect.get('reason', '')}), came {value!r} ({why.strip()})"
    return None


def _meaning_of(call: Any) -> Any:
    """A call with its arguments parsed: JSON's white space does not matter."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
