"""Servers' replies taken apart: chat and text completions, vLLM's and SGLang's own shapes, errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_kimi.captures.fields import PART_LISTS, REASONING_NAMES
from eagle3_kimi.captures.turns import Turn
from eagle3_kimi.captures.verdicts import Fault

PROMPT_IDS = ("prompt_token_ids", "input_ids")
_PROMPT_NAMES = ("prompt", "messages", "input", "question", "instruction")
_ERROR_KEYS = frozenset({"detail", "message", "type", "code", "param", "status"})


def faulty(name: str, fault: Fault, detail: str) -> Turn:
    """A turn that could not be read."""
    return Turn(format=name, message={}, fault=(fault, detail))


def is_error(record: Mapping[str, Any]) -> bool:
    """True for an error's body, with or without half a reply."""
    status = record.get("status_code")
    failed = isinstance(status, int) and status >= 400
    if record.get("error") or failed or record.get("object") == "error":
        return True
    return bool(record) and record.keys() <= _ERROR_KEYS and not isinstance(record.get("message"), dict)


def read_error(record: Mapping[str, Any]) -> list[Turn]:
    """An error instead of a reply, or riding on one: then each of its choices is to blame."""
    error = record.get("error") or record
    message = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    code = f"status {record['status_code']}: " if isinstance(record.get("status_code"), int) else ""
    detail = f"{code}{message}"[:200]
    if record.get("choices"):
        return [_blame(turn, detail) for turn in read_choices(record)]
    return [faulty("error.record", Fault.ERROR_BODY, detail)]


def _blame(turn: Turn, detail: str) -> Turn:
    turn.fault = (Fault.UPSTREAM_ERROR, detail)
    return turn


def read_choices(record: Mapping[str, Any]) -> list[Turn]:
    """A chat or text completion: one turn a choice."""
    choices = record["choices"]
    if not isinstance(choices, list) or not choices:
        return [faulty("openai.chat.completion", Fault.NO_CHOICES, "the reply holds no choices")]
    return [_read_choice(record, choice, position) for position, choice in enumerate(choices)]


def _read_choice(record: Mapping[str, Any], choice: Any, position: int) -> Turn:
    if not isinstance(choice, dict):
        return faulty("openai.chat.completion", Fault.NOT_A_RESPONSE, f"choices[{position}] is no object")
    message = choice.get("message")
    raw = not isinstance(message, dict)
    turn = Turn(
        format="openai.text_completion" if raw else "openai.chat.completion",
        message={"content": choice.get("text")} if raw else with_reasoning_beside(choice["message"], choice),
        index=_index_of(choice, position),
        finish=choice.get("finish_reason"),
        stop=choice.get("stop_reason"),
        native_finish=choice.get("native_finish_reason"),
        raw=raw,
        token_ids=choice.get("token_ids"),
        prompt_token_ids=choice.get("prompt_token_ids") or record.get("prompt_token_ids"),
        prompt=prompt_of(record),
        usage=record.get("usage") if len(record["choices"]) == 1 else None,
    )
    error = choice.get("error") or turn.message.get("error")
    if error:
        turn.fault = (Fault.UPSTREAM_ERROR, str(error)[:200])
    elif raw and "text" not in choice:
        turn.fault = (Fault.NOT_A_RESPONSE, f"choices[{position}] holds neither a message nor a text")
    return turn


def with_reasoning_beside(message: Mapping[str, Any], holder: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the reasoning that stands beside it instead of in it."""
    beside = {name: holder[name] for name in (*REASONING_NAMES, *PART_LISTS) if holder.get(name)}
    return {**message, **{name: value for name, value in beside.items() if not message.get(name)}}


def _index_of(choice: Mapping[str, Any], position: int) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) and not isinstance(index, bool) else position


def read_outputs(record: Mapping[str, Any]) -> list[Turn]:
    """vLLM's `RequestOutput`."""
    turns = []
    for position, output in enumerate(record["outputs"]):
        if not isinstance(output, dict):
            turns.append(faulty("vllm.offline", Fault.NOT_A_RESPONSE, f"outputs[{position}] is no object"))
            continue
        turns.append(
            Turn(
                format="vllm.offline",
                message={"content": output.get("text")},
                index=_index_of(output, position),
                finish=output.get("finish_reason") if record.get("finished") is not False else None,
                stop=output.get("stop_reason"),
                raw=True,
                token_ids=output.get("token_ids"),
                prompt_token_ids=record.get("prompt_token_ids"),
                prompt=record.get("prompt"),
            )
        )
    return turns or [faulty("vllm.offline", Fault.NO_CHOICES, "the record holds no outputs")]


def read_sglang(record: Mapping[str, Any]) -> list[Turn]:
    """SGLang's `/generate`."""
    info = record["meta_info"]
    finish = info.get("finish_reason")
    return [
        Turn(
            format="sglang.generate",
            message={"content": record.get("text")},
            index=_index_of(record, 0),
            finish=finish,
            stop=finish.get("matched") if isinstance(finish, dict) else None,
            raw=True,
            token_ids=record.get("output_ids"),
            prompt_token_ids=first_of(record, PROMPT_IDS),
            prompt=record.get("prompt"),
        )
    ]


def prompt_of(row: Mapping[str, Any]) -> Any:
    """What was asked, where the record holds it: text or messages."""
    return first_of(row, _PROMPT_NAMES)


def first_of(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of the fields that is there and not empty."""
    for name in names:
        if value := row.get(name):
            return value
    return None
