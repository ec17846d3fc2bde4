"""One generated turn as a record holds it, before anything is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3_kimi.captures.verdicts import Fault, Refused
from eagle3_kimi.protocol import COMPLETE_FINISH_REASONS, Reason

NOT_RECORDED = object()
"""The format has no finish reason (rows of a data set), which is not the same as a null one."""

_LENGTH = frozenset({"length", "max_tokens", "max_length", "max_output_tokens", "model_length"})
_ABORT = frozenset({"abort", "aborted", "error", "cancelled", "canceled", "timeout"})
_NATURAL_STOPS = frozenset({"stop", "end_turn", "eos", "eos_token", "tool_calls", "tool_use"})
_KIMI_CONTROL_IDS, _KIMI_EOS_IDS = range(163584, 163840), (163585, 163586, 163593)


@dataclass(slots=True, kw_only=True)
class Turn:
    """Fields are as they came: any type."""

    format: str
    message: Mapping[str, Any]
    index: int = 0
    finish: Any = NOT_RECORDED
    stop: Any = None
    """vLLM's `stop_reason`, SGLang's `matched`: what ended the text; null for the end of turn."""
    native_finish: Any = None
    """A gateway's `native_finish_reason`."""
    raw: bool = False
    """True where no parser stood between the model and the text."""
    token_ids: Any = None
    prompt_token_ids: Any = None
    prompt: Any = None
    request: Mapping[str, Any] = field(default_factory=dict)
    usage: Any = None
    fault: tuple[Fault | Reason, str] | None = None
    """Found while the record was taken apart."""
    earlier: list[Turn] = field(default_factory=list)
    """Earlier generated turns of the same conversation, which must be complete as well."""


def finish_name(finish: Any) -> str | None:
    """The finish reason's name; SGLang wraps it as `{type, ...}`."""
    if isinstance(finish, dict):
        finish = finish.get("type")
    return finish if isinstance(finish, str) else None


def check_finish(turn: Turn, eos_ids: tuple[int, ...] | None, ends: tuple[str, ...]) -> None:
    """Raises unless the turn ended by itself. An allow-list: what is not known to be good is not good."""
    if turn.finish is not NOT_RECORDED:
        name = finish_name(turn.finish)
        if name not in COMPLETE_FINISH_REASONS:
            raise _finish_fault(name, turn.finish)
    native = str(turn.native_finish).lower()
    if native in _LENGTH or native in _ABORT:
        raise Refused(
            Fault.CONFLICTING_FINISH, f"finish_reason says {turn.finish}, native_finish_reason {turn.native_finish}"
        )
    _check_stop(turn.stop, eos_ids, ends)


def _finish_fault(name: str | None, raw: Any) -> Refused:
    if name in _LENGTH:
        return Refused(Reason.FINISH_LENGTH, "the answer was cut at the token limit")
    if name in _ABORT:
        return Refused(Reason.FINISH_ABORT, f"the request was ended early: {name}")
    if name == "content_filter":
        return Refused(Fault.CONTENT_FILTER, "a content filter ended the answer")
    return Refused(Reason.FINISH_UNKNOWN, f"finish reason {raw!r} is neither stop nor tool_calls")


def _check_stop(stop: Any, eos_ids: tuple[int, ...] | None, ends: tuple[str, ...]) -> None:
    if isinstance(stop, str) and stop and stop not in ends and stop not in _NATURAL_STOPS:
        raise Refused(Fault.STOPPED_BY_STRING, f"the stop string {stop!r} ended the answer, not the model")
    if isinstance(stop, int) and not isinstance(stop, bool):
        known = eos_ids if eos_ids is not None else _KIMI_EOS_IDS
        if stop not in known and (eos_ids is not None or stop in _KIMI_CONTROL_IDS):
            raise Refused(Fault.STOPPED_BY_STRING, f"token {stop} ended the answer; an end of turn is one of {known}")
