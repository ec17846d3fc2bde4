"""One captured response -> one verdict per choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_kimi.captures.context import TRAILING_ENDS, CaptureContext, state_of_rendered, switched_off, text_of_prompt
from eagle3_kimi.captures.damage import has_surrogates, is_degenerate_text, join_surrogates
from eagle3_kimi.captures.fields import Fields, read_fields
from eagle3_kimi.captures.shapes import read_turns
from eagle3_kimi.captures.split import Pieces, split_raw, tidy_parsed
from eagle3_kimi.captures.token_ids import IdsReading, prompt_state_of_ids, read_token_ids
from eagle3_kimi.captures.tools import check_declared, read_tool_calls, same_calls
from eagle3_kimi.captures.turns import Turn, check_finish, finish_name
from eagle3_kimi.captures.verdicts import CaptureVerdict, Code, Fault, Refused, Repair, Verdict
from eagle3_kimi.protocol import REPLACEMENT_CHARACTER, Reason, is_blank

_PLACEHOLDERS = frozenset(
    {"none", "null", "n/a", "nan", "undefined", "redacted", "empty", "no reasoning", "placeholder"}
)
_MIN_ECHO, _MIN_COPY, _MAX_PLACEHOLDER = 4, 32, 32
"""Characters: a shorter prompt may well begin the thoughts; a shorter reasoning may well begin the answer."""


def judge(record: Any, context: CaptureContext | Mapping[str, Any] | None = None) -> list[CaptureVerdict]:
    """Judges one captured response, whatever its format.

    Args:
        record: the parsed JSON of a response, a row, a list of chunks; or the text of a stream.
        context: what is known about the request; see `CaptureContext`. Without it: Kimi-K2.5, thinking on,
            the prompt ended in `<think>`.

    Returns:
        one verdict per choice, at least one. Never raises on any record.
    """
    known = CaptureContext.of(context)
    return [judge_turn(turn, known) for turn in read_turns(record)]


def judge_turn(turn: Turn, context: CaptureContext) -> CaptureVerdict:
    """Judges one turn that was taken out of a record."""
    common: dict[str, Any] = {
        "format": turn.format,
        "choice_index": turn.index,
        "finish_reason": finish_name(turn.finish),
        "prompt": turn.prompt,
        "prompt_token_ids": _ids(turn.prompt_token_ids),
        "output_token_ids": _ids(turn.token_ids),
    }
    try:
        for position, earlier in enumerate(turn.earlier):
            try:
                _read(earlier, context)
            except Refused as refused:
                raise Refused(refused.reason, f"assistant turn {position}: {refused.detail}") from refused
        pieces, exact = _read(turn, context)
    except Refused as refused:
        return CaptureVerdict(verdict=Verdict.REJECT, reason=refused.reason, detail=refused.detail, **common)
    reason: Code = pieces.repairs[0] if pieces.repairs else Reason.OK
    return CaptureVerdict(
        verdict=Verdict.REPAIR if pieces.repairs else Verdict.ACCEPT,
        reason=reason,
        reasoning=pieces.reasoning.strip(),
        content=pieces.content.strip(),
        tool_calls=pieces.tool_calls,
        repairs=tuple(dict.fromkeys(pieces.repairs)),
        token_exact=exact,
        **common,
    )


def _read(turn: Turn, context: CaptureContext) -> tuple[Pieces, bool]:
    """The turn's pieces, and whether token ids decided."""
    if turn.fault is not None:
        raise Refused(*turn.fault)
    eos_ids = context.eos_ids or (context.protocol.markers.stop_token_ids if context.protocol else None)
    check_finish(turn, eos_ids, (*context.markers.ends, *TRAILING_ENDS))
    state = _prompt_state(turn, context)
    ids = _read_ids(turn, context, state)
    if ids is not None and ids.turn.reason is not Reason.OK:
        raise Refused(ids.turn.reason, f"by the token ids: {ids.turn.detail}")
    if ids is not None and ids.readable:
        pieces = _decided_by_ids(turn, context, state, ids)
    else:
        pieces = _read_text(turn, context, state, ids)
    _check_complete(pieces, turn, context)
    return pieces, ids is not None


def _prompt_state(turn: Turn, context: CaptureContext) -> str:
    """`opened` or `absent`: the rendered prompt decides, then its ids, then the flags, then Kimi's default."""
    prompt_ids = _ids(turn.prompt_token_ids)
    state = None
    if context.prompt_suffix is not None:
        state = state_of_rendered(context.prompt_suffix, context.think_tags)
    elif prompt_ids and (by_ids := prompt_state_of_ids(prompt_ids, context)):
        state = by_ids
    elif isinstance(turn.prompt, str) and ("<|im_" in turn.prompt or turn.prompt.rstrip().endswith(context.think_tags)):
        state = state_of_rendered(turn.prompt, context.think_tags)
    if state == "closed":
        raise Refused(Reason.PROMPT_CLOSED_THOUGHTS, "the prompt ended with closed thoughts: the model could not think")
    if state is None and (context.thinking is False or switched_off(context.request_body or turn.request)):
        raise Refused(Fault.THINKING_DISABLED, "thinking was switched off in the request")
    return state or "opened"


def _read_ids(turn: Turn, context: CaptureContext, state: str) -> IdsReading | None:
    output = _ids(turn.token_ids)
    if not output:
        return None
    finish = finish_name(turn.finish)
    return read_token_ids(output, _ids(turn.prompt_token_ids), state=state, finish=finish, context=context)


def _ids(value: Any) -> list[int] | None:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    return None


def _decided_by_ids(turn: Turn, context: CaptureContext, state: str, ids: IdsReading) -> Pieces:
    """The pieces the ids spell; what the text said only tells whether that is a repair."""
    read = ids.turn
    pieces = Pieces(read.reasoning, read.content, [call.as_openai() for call in read.tool_calls])
    try:
        told = _read_text(turn, context, state, None)
    except Refused as refused:
        damaged = REPLACEMENT_CHARACTER in str(turn.message.get("content")) or refused.reason is Fault.LONE_SURROGATE
        pieces.repairs = [Repair.REDECODED_FROM_TOKEN_IDS if damaged else Repair.RESPLIT_FROM_TOKEN_IDS]
        return pieces
    same_text = (told.reasoning.strip(), told.content.strip()) == (read.reasoning.strip(), read.content.strip())
    if same_text and same_calls(told.tool_calls, pieces.tool_calls):
        pieces.repairs, pieces.tool_calls = told.repairs, told.tool_calls
    elif REPLACEMENT_CHARACTER in told.reasoning + told.content:
        pieces.repairs = [Repair.REDECODED_FROM_TOKEN_IDS]
    else:
        pieces.repairs = [Repair.RESPLIT_FROM_TOKEN_IDS]
    return pieces


def _read_text(turn: Turn, context: CaptureContext, state: str, ids: IdsReading | None) -> Pieces:
    message = turn.message
    if message.get("role", "assistant") not in ("assistant", None):
        raise Refused(Fault.WRONG_ROLE, f"expected an assistant's message, came role {message['role']!r}")
    if isinstance(message.get("refusal"), str) and message["refusal"].strip():
        raise Refused(Fault.REFUSAL, f"the server refused: {message['refusal'][:80]}")
    fields = read_fields(message)
    _mend_surrogates(fields)
    if turn.raw:
        _check_echo(fields.content, turn, context)
    calls = read_tool_calls(message.get("tool_calls"), fields.repairs)
    markers = context.markers
    has_reasoning = not is_blank(_without_tags(fields.reasoning, context))
    if has_reasoning:
        pieces = tidy_parsed(fields.reasoning, fields.content, markers, parsed=bool(calls))
    elif markers.may_be_in(fields.content):
        pieces = split_raw(fields.content, markers, opened=state == "opened", parsed=bool(calls))
    else:
        raise _missing(turn, fields, ids)
    pieces.repairs.extend(fields.repairs)
    if calls and pieces.tool_calls and not same_calls(calls, pieces.tool_calls):
        raise Refused(Fault.CONFLICTING_TOOL_CALLS, "the text's tool section and tool_calls differ")
    pieces.tool_calls = calls or pieces.tool_calls
    return pieces


def _without_tags(reasoning: str, context: CaptureContext) -> str:
    opening, closing = context.think_tags
    return reasoning.strip().removeprefix(opening).removesuffix(closing)


def _mend_surrogates(fields: Fields) -> None:
    for name in ("reasoning", "content"):
        text = getattr(fields, name)
        if has_surrogates(text):
            joined = join_surrogates(text)
            if joined is None:
                raise Refused(Fault.LONE_SURROGATE, f"the {name} holds half of a surrogate pair: no UTF-8 can hold it")
            setattr(fields, name, joined)
            fields.repairs.append(Repair.SURROGATES_JOINED)


def _check_echo(text: str, turn: Turn, context: CaptureContext) -> None:
    for prompt in (context.prompt_text, turn.prompt):
        if isinstance(prompt, str) and len(prompt.strip()) >= _MIN_ECHO and text.lstrip().startswith(prompt.strip()):
            raise Refused(Fault.PROMPT_ECHOED, "the output begins with the prompt's text")


def _missing(turn: Turn, fields: Fields, ids: IdsReading | None) -> Refused:
    """Names the likeliest way in which the thoughts were lost."""
    if ids is not None:
        return Refused(
            Fault.TOKEN_IDS_UNREADABLE,
            "the token ids hold the thoughts, but the text does not show where they end: the target's tokenizer can",
        )
    usage = turn.usage if isinstance(turn.usage, dict) else {}
    details = usage.get("completion_tokens_details")
    thought = details.get("reasoning_tokens") if isinstance(details, dict) else usage.get("reasoning_tokens")
    total, shown = usage.get("completion_tokens"), len(fields.content.encode("utf-8", "surrogatepass"))
    if (isinstance(thought, int) and thought > 0) or (isinstance(total, int) and total > shown + 8 and shown):
        return Refused(
            Fault.REASONING_DROPPED_BY_CLIENT,
            f"usage counts {thought or total} tokens that are in no field of the record",
        )
    if fields.reasoning_present:
        return Refused(Reason.BLANK_REASONING, "the reasoning field is there and blank")
    return Refused(Fault.MISSING_REASONING, "no reasoning in any field, and no tag in the content")


def _check_complete(pieces: Pieces, turn: Turn, context: CaptureContext) -> None:
    """Reasoning, and an answer or valid calls; undamaged."""
    reasoning, content = pieces.reasoning.strip(), pieces.content.strip()
    if is_blank(reasoning):
        raise Refused(Reason.BLANK_REASONING, "the reasoning is blank")
    if len(reasoning) <= _MAX_PLACEHOLDER and _is_placeholder(reasoning):
        raise Refused(Fault.PLACEHOLDER_REASONING, f"{reasoning[:40]!r} only fills the field")
    if finish_name(turn.finish) == "tool_calls" and not pieces.tool_calls:
        raise Refused(Fault.TOOL_CALLS_MISSING, "finish reason tool_calls, and no call")
    if is_blank(content) and not pieces.tool_calls:
        raise Refused(Reason.BLANK_ANSWER, "the answer is blank and there is no tool call")
    if reasoning == content or (len(reasoning) >= _MIN_COPY and content.startswith(reasoning)):
        raise Refused(Fault.CONTENT_REPEATS_REASONING, "the content begins with a copy of the reasoning: two readings")
    check_declared(pieces.tool_calls, (context.request_body or turn.request).get("tools"))
    calls = "".join(f"{c['id']}{c['function']['name']}{c['function']['arguments']}" for c in pieces.tool_calls)
    if has_surrogates(calls):
        raise Refused(Fault.LONE_SURROGATE, "a tool call holds half of a surrogate pair")
    if REPLACEMENT_CHARACTER in reasoning + content + calls and not _prompt_has_replacement(turn, context):
        raise Refused(Reason.REPLACEMENT_CHARACTER, "the text holds U+FFFD: bytes that are no character")
    if is_degenerate_text(reasoning):
        raise Refused(Reason.DEGENERATE_REASONING, "the reasoning repeats itself without end")
    if is_degenerate_text(content):
        raise Refused(Reason.DEGENERATE_ANSWER, "the answer repeats itself without end")


def _is_placeholder(reasoning: str) -> bool:
    return not any(map(str.isalnum, reasoning)) or reasoning.strip(" .()[]<>*_-").lower() in _PLACEHOLDERS


def _prompt_has_replacement(turn: Turn, context: CaptureContext) -> bool:
    return REPLACEMENT_CHARACTER in context.prompt_text or REPLACEMENT_CHARACTER in text_of_prompt(turn.prompt)
