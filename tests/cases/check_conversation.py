"""Checks one case of kind `conversation`: a row of a prompt data set -> a conversation, or a refusal."""

from __future__ import annotations

from functools import cache
from typing import Any

from eagle3_kimi.chat import render_answer
from eagle3_kimi.prompts.conversations import Reading, normalise_row
from tests.kimi_tokenizer import KimiTokenizer

_ROLE_NAME_KEYS = ("roles", "role_names", "role_map", "declared_roles")


@cache
def _tokenizer() -> KimiTokenizer:
    return KimiTokenizer()


def check(case: dict[str, Any]) -> str | None:
    """None when the case passes, else one line that says what differs."""
    context, expect = case.get("context") or {}, case["expect"]
    names = next((context[key] for key in _ROLE_NAME_KEYS if context.get(key)), {})
    reading = Reading(
        for_training=context.get("task", "train") == "train",
        require_reasoning=bool(context.get("require_reasoning")),
        role_names={name.strip().casefold(): role for name, role in names.items()},
    )
    row = normalise_row(case["input"], reading)
    if row.verdict != expect["verdict"]:
        why = row.refusal or ", ".join(row.repairs) or "nothing to repair"
        return (
            f"verdict: expected {expect['verdict']} ({expect.get('reason')}), came {row.verdict} ({why}) {row.detail}"
        )
    if row.conversation is None:
        return None
    messages = list(row.conversation.messages)
    answer = next((m for m in reversed(messages) if m["role"] == "assistant"), {})
    came: dict[str, Any] = {
        "reasoning": answer.get("reasoning", "").strip() or None,
        "content": answer.get("content", "").strip(),
        "messages": messages,
        "supervised_turns": list(row.supervised_turns),
    }
    for field, value in came.items():
        if field in expect and _comparable(expect[field]) != _comparable(value):
            return f"{field}: expected {expect[field]!r}, came {value!r}"
    target = _tokenizer().decode(render_answer(_tokenizer(), answer, preset="kimi-k2.5")) if answer else ""
    target = "<think>" + target  # the generation prompt ends there
    for text in _texts(expect.get("rendered_target_must_contain")):
        if text not in target:
            return f"the rendered target lacks {text!r}: {target!r}"
    for text in _texts(expect.get("rendered_target_must_not_contain")):
        if text in target:
            return f"the rendered target holds {text!r}: {target!r}"
    return None


def _comparable(value: Any) -> Any:
    """`reasoning` and `content` of a case are stripped of outer white space."""
    return value.strip() or None if isinstance(value, str) else value


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
