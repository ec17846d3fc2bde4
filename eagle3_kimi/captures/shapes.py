"""Takes a record apart into generated turns, guessing its format by its keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from eagle3_kimi.captures.fields import PART_LISTS, REASONING_NAMES
from eagle3_kimi.captures.streams import is_chunk, merge_chunks, parse_sse
from eagle3_kimi.captures.turns import NOT_RECORDED, Turn
from eagle3_kimi.captures.verdicts import Fault

CONTENT_NAMES = (
    "content",
    "response",
    "answer",
    "output",
    "completion",
    "text",
    "generation",
    "generated_text",
    "model_output",
)
"""What rows of a data set call the answer."""
WRAPPERS = ("response", "body", "completion", "result", "output", "raw_response", "data")
"""Keys under which logs and batch files keep the server's reply."""
_OUTPUT_IDS = ("output_token_ids", "token_ids", "output_ids", "completion_token_ids")
_PROMPT_IDS = ("prompt_token_ids", "input_ids")
_FINISH_NAMES = ("finish_reason", "finish")
_ASSISTANTS = frozenset({"assistant", "gpt", "model", "bot", "chatbot"})
_MAX_DEPTH = 5
_ERROR_KEYS = frozenset({"detail", "message", "type", "code", "param", "status"})


def read_turns(record: Any, depth: int = 0) -> list[Turn]:
    """The generated turns of a record: one per choice, or the last one of a conversation. At least one.

    Never raises: what cannot be read is a turn with a fault.
    """
    if depth > _MAX_DEPTH:
        return [_faulty("unknown", Fault.NOT_A_RESPONSE, f"nested deeper than {_MAX_DEPTH} replies")]
    if isinstance(record, str | bytes):
        return _read_text(record, depth)
    if isinstance(record, list):
        return _read_list(record, depth)
    if not isinstance(record, dict):
        came = type(record).__name__
        return [_faulty("unknown", Fault.NOT_A_RESPONSE, f"expected a JSON object, came {came}")]
    for applies, read in _SHAPES:
        if applies(record):
            return read(record, depth)
    keys = ", ".join(map(str, list(record)[:12])) or "none"
    return [
        _faulty(
            "unknown", Fault.NOT_A_RESPONSE, f"no known format: expected choices, outputs, message(s)...; keys {keys}"
        )
    ]


def _faulty(name: str, fault: Fault, detail: str) -> Turn:
    return Turn(format=name, message={}, fault=(fault, detail))


def _read_text(text: str | bytes, depth: int) -> list[Turn]:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        if text.lstrip().startswith(("{", "[")):
            return read_turns(json.loads(text), depth + 1)
        chunks = parse_sse(text)
    except (ValueError, RecursionError) as error:
        return [_faulty("unknown", Fault.NOT_A_RESPONSE, f"expected JSON or a stream's text ({error})")]
    return read_turns({"chunks": chunks}, depth + 1)


def _read_list(items: list[Any], depth: int) -> list[Turn]:
    if items and all(isinstance(item, dict) for item in items):
        if any(is_chunk(item) for item in items):
            return _read_chunks({"chunks": items}, depth)
        if any("role" in item or "from" in item for item in items):
            return _read_messages({"messages": items}, depth)
        return [turn for item in items for turn in read_turns(item, depth + 1)]
    return [_faulty("unknown", Fault.NOT_A_RESPONSE, "expected a list of choices, chunks or messages")]


def _is_error(record: Mapping[str, Any]) -> bool:
    status = record.get("status_code")
    failed = isinstance(status, int) and status >= 400
    if record.get("error") or failed or record.get("object") == "error":
        return True
    return bool(record) and record.keys() <= _ERROR_KEYS and not isinstance(record.get("message"), dict)


def _read_error(record: Mapping[str, Any], depth: int) -> list[Turn]:
    error = record.get("error") or record
    message = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    code = f"status {record['status_code']}: " if isinstance(record.get("status_code"), int) else ""
    detail = f"{code}{message}"[:200]
    if record.get("choices"):
        return [_blame(turn, detail) for turn in _read_choices(record, depth)]
    return [_faulty("error.record", Fault.ERROR_BODY, detail)]


def _blame(turn: Turn, detail: str) -> Turn:
    turn.fault = (Fault.UPSTREAM_ERROR, detail)
    return turn


def _read_chunks(record: Mapping[str, Any], depth: int) -> list[Turn]:
    return merge_chunks(record["chunks"], lambda chunk: read_turns(chunk, depth + 1))


def _read_choices(record: Mapping[str, Any], depth: int) -> list[Turn]:
    choices = record["choices"]
    if not isinstance(choices, list) or not choices:
        return [_faulty("openai.chat.completion", Fault.NO_CHOICES, "the reply holds no choices")]
    return [_read_choice(record, choice, position) for position, choice in enumerate(choices)]


def _read_choice(record: Mapping[str, Any], choice: Any, position: int) -> Turn:
    if not isinstance(choice, dict):
        return _faulty("openai.chat.completion", Fault.NOT_A_RESPONSE, f"choices[{position}] is no object")
    message = choice.get("message")
    raw = not isinstance(message, dict)
    turn = Turn(
        format="openai.text_completion" if raw else "openai.chat.completion",
        message={"content": choice.get("text")} if raw else _with_reasoning_beside(choice["message"], choice),
        index=_index_of(choice, position),
        finish=choice.get("finish_reason"),
        stop=choice.get("stop_reason"),
        native_finish=choice.get("native_finish_reason"),
        raw=raw,
        token_ids=choice.get("token_ids"),
        prompt_token_ids=choice.get("prompt_token_ids") or record.get("prompt_token_ids"),
        prompt=_prompt_of(record),
        usage=record.get("usage") if len(record["choices"]) == 1 else None,
    )
    if choice.get("error"):
        turn.fault = (Fault.UPSTREAM_ERROR, str(choice["error"])[:200])
    elif raw and "text" not in choice:
        turn.fault = (Fault.NOT_A_RESPONSE, f"choices[{position}] holds neither a message nor a text")
    return turn


def _with_reasoning_beside(message: Mapping[str, Any], holder: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the reasoning that stands beside it instead of in it."""
    beside = {name: holder[name] for name in (*REASONING_NAMES, *PART_LISTS) if holder.get(name)}
    return {**message, **{name: value for name, value in beside.items() if not message.get(name)}}


def _index_of(choice: Mapping[str, Any], position: int) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) and not isinstance(index, bool) else position


def _read_outputs(record: Mapping[str, Any], depth: int) -> list[Turn]:
    """vLLM's `RequestOutput`."""
    turns = []
    for position, output in enumerate(record["outputs"]):
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
    return turns or [_faulty("vllm.offline", Fault.NO_CHOICES, "the record holds no outputs")]


def _read_sglang(record: Mapping[str, Any], depth: int) -> list[Turn]:
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
            prompt_token_ids=next((record[n] for n in _PROMPT_IDS if record.get(n)), None),
            prompt=record.get("prompt"),
        )
    ]


def _wrapped(record: Mapping[str, Any]) -> Any:
    """The reply inside a log's or a batch file's row."""
    for name in WRAPPERS:
        value = record.get(name)
        if isinstance(value, str) and value.lstrip().startswith('{"') and '"choices"' in value:
            return value
        if isinstance(value, dict | list) and value and not _is_parts(value):
            return value
    return None


def _is_parts(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(
        isinstance(item, dict) and "type" in item and "role" not in item and "choices" not in item for item in items
    )


def _read_wrapped(record: Mapping[str, Any], depth: int) -> list[Turn]:
    turns = read_turns(_wrapped(record), depth + 1)
    request = record.get("request")
    request = request.get("body", request) if isinstance(request, dict) else {}
    for turn in turns:
        turn.request = turn.request or (request if isinstance(request, dict) else {})
        turn.prompt = turn.prompt or _prompt_of(record) or _prompt_of(turn.request)
        if turn.prompt_token_ids is None:
            turn.prompt_token_ids = next((record[n] for n in _PROMPT_IDS if record.get(n)), None)
    return turns


def _prompt_of(row: Mapping[str, Any]) -> Any:
    return next(
        (row[name] for name in ("prompt", "messages", "input", "question", "instruction") if row.get(name)), None
    )


def _read_message(row: Mapping[str, Any], depth: int) -> list[Turn]:
    return [_row_turn("jsonl.message", row["message"], row, prompt=_prompt_of(row))]


def _row_turn(name: str, message: Mapping[str, Any], row: Mapping[str, Any], *, prompt: Any) -> Turn:
    """A turn of a row that need not record how it finished; where it does, that counts."""
    finish = next((holder[n] for holder in (message, row) for n in _FINISH_NAMES if n in holder), NOT_RECORDED)
    return Turn(
        format=name,
        message=message,
        finish=finish,
        stop=row.get("stop_reason"),
        native_finish=row.get("native_finish_reason"),
        token_ids=next((row[n] for n in _OUTPUT_IDS if row.get(n)), None),
        prompt_token_ids=next((row[n] for n in _PROMPT_IDS if row.get(n)), None),
        prompt=prompt,
        request=row["request"] if isinstance(row.get("request"), dict) else {},
        usage=row.get("usage"),
    )


def _read_messages(row: Mapping[str, Any], depth: int) -> list[Turn]:
    """A conversation: the last assistant turn is the answer, the ones before it must be complete too."""
    messages = row.get("messages") or row["conversations"]
    answers = [(i, _as_message(m)) for i, m in enumerate(messages) if _role_of(m) in _ASSISTANTS]
    if not answers:
        return [_faulty("jsonl.messages", Fault.NOT_A_RESPONSE, "the conversation holds no assistant turn")]
    turns = [_row_turn("jsonl.messages", message, {}, prompt=messages[:i]) for i, message in answers]
    position, answer = answers[-1]
    last = _row_turn("jsonl.messages", _with_reasoning_beside(answer, row), row, prompt=messages[:position])
    last.earlier = turns[:-1]
    return [last]


def _role_of(message: Any) -> str:
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return role.strip().lower() if isinstance(role, str) else ""


def _as_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": message.get("value"), **message, "role": "assistant"}


def _ends_in_answer(row: Mapping[str, Any]) -> bool:
    messages = row.get("messages") or row.get("conversations")
    return isinstance(messages, list) and bool(messages) and _role_of(messages[-1]) in _ASSISTANTS


def _has_answer(row: Mapping[str, Any]) -> bool:
    messages = row.get("messages") or row.get("conversations")
    return isinstance(messages, list) and any(_role_of(message) in _ASSISTANTS for message in messages)


def _is_flat(row: Mapping[str, Any]) -> bool:
    return any(name in row for name in (*CONTENT_NAMES, *REASONING_NAMES, "tool_calls"))


def _read_flat(row: Mapping[str, Any], depth: int) -> list[Turn]:
    """A row of a data set: `reasoning` beside `content`, or whatever the row calls them."""
    present = [name for name in CONTENT_NAMES if row.get(name)]
    present = present[:1] if len({str(row[name]) for name in present}) == 1 else present
    message = {**row, "content": row[present[0]] if present else None, "role": "assistant"}
    turn = _row_turn("jsonl.row", message, row, prompt=_prompt_of(row))
    turn.raw = not any(row.get(name) for name in (*REASONING_NAMES, *PART_LISTS))
    if len(present) > 1:
        turn.fault = (Fault.NOT_A_RESPONSE, f"which is the answer: {' or '.join(present)}?")
    return [turn]


_Shape = tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any], int], list[Turn]]]
_SHAPES: tuple[_Shape, ...] = (
    (_is_error, _read_error),
    (lambda r: isinstance(r.get("chunks"), list), _read_chunks),
    (is_chunk, lambda r, depth: _read_chunks({"chunks": [r]}, depth)),
    (lambda r: "choices" in r, _read_choices),
    (lambda r: isinstance(r.get("outputs"), list) and all(isinstance(o, dict) for o in r["outputs"]), _read_outputs),
    (lambda r: isinstance(r.get("meta_info"), dict), _read_sglang),
    (_ends_in_answer, _read_messages),
    (lambda r: isinstance(r.get("message"), dict), _read_message),
    (lambda r: _wrapped(r) is not None, _read_wrapped),
    (_is_flat, _read_flat),
    (_has_answer, _read_messages),
)
"""The first that applies reads the record."""
