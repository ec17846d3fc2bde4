"""What went wrong with a whole file, in one sentence, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eagle3_kimi.captures.verdicts import Code, Fault, Repair
from eagle3_kimi.protocol import Reason

_SYSTEMATIC = 0.05
"""Share of the responses from which a fault is named; below it, single rows are to blame."""
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault that many rows share. `finding` completes `all 2,963 rows: ...`."""

    finding: str
    change: str


_PARSER = (
    "start the server with its reasoning parser (`--reasoning-parser kimi_k2`) and send no `enable_thinking: false`, "
    "which switches that parser off; or keep token ids: `return_token_ids: true`. What is here can be split: see --out"
)
_INSIDE_CONTENT = Diagnosis("thoughts are inside `content`; the server ran without a reasoning parser", _PARSER)
_DAMAGED = Diagnosis(
    "the text holds U+FFFD; byte tokens were decoded one at a time", "decode ids together, or keep the token ids"
)
_TOOL_PARSER = Diagnosis(
    "tool calls are inside the text; the server ran without a tool parser",
    "start it with `--enable-auto-tool-choice --tool-call-parser kimi_k2`; what is here can be parsed: see --out",
)
_ENDLESS = Diagnosis(
    "the text repeats itself without end", "check sampling (temperature 1.0, top_p 0.95) and the model's weights"
)
_OFF = Diagnosis(
    "the prompt had closed the thoughts: thinking was switched off",
    "render prompts with the template variable `thinking` on (`enable_thinking` is not Kimi's); "
    "the last token must be <think>",
)
_TWO_READINGS = Diagnosis(
    "think tags stand where they have two readings", "capture token ids (`return_token_ids: true`): they decide"
)

_DIAGNOSES: dict[Code, Diagnosis] = {
    Repair.SPLIT_INLINE_THINK: _INSIDE_CONTENT,
    Repair.SPLIT_PREFILLED_THINK: _INSIDE_CONTENT,
    Repair.TOOL_SECTION_CUT_FROM_REASONING: _TOOL_PARSER,
    Repair.TOOL_SECTION_PARSED_FROM_CONTENT: _TOOL_PARSER,
    Repair.REASONING_DETAILS_JOINED: Diagnosis(
        "thoughts are only in a gateway's `reasoning_details`", "read them there, or ask the server itself"
    ),
    Repair.REASONING_PARTS_MOVED: Diagnosis(
        "thoughts are parts of a `content` list", "nothing is lost; --out writes them as `reasoning`"
    ),
    Repair.STRIPPED_END_OF_TURN: Diagnosis(
        "the end-of-turn string is left in the text", "request `skip_special_tokens: true`, or keep token ids"
    ),
    Repair.RESPLIT_FROM_TOKEN_IDS: Diagnosis(
        "text and token ids disagree about the end of the thoughts; the ids decided", "read the ids, not the text"
    ),
    Repair.REDECODED_FROM_TOKEN_IDS: _DAMAGED,
    Repair.DUPLICATE_DROPPED: Diagnosis(
        "requests are there more than once", "make the client write a result once, keyed by its request"
    ),
    Fault.MISSING_REASONING: Diagnosis(
        "there is no reasoning in any field and no think tag in the content",
        "either the model did not think (check that the rendered prompt ends in <think>; the template variable is "
        "`thinking`) or the client kept only `content` (vLLM says `reasoning`, SGLang and older vLLM "
        "`reasoning_content`)",
    ),
    Reason.BLANK_REASONING: Diagnosis(
        "the reasoning is an empty string",
        "the client read a field that this server does not fill (`reasoning` against `reasoning_content`), or the "
        "model did not think; look at one raw reply of the server",
    ),
    Fault.PLACEHOLDER_REASONING: Diagnosis(
        "the reasoning is a placeholder", "a client filled the field to satisfy an API; capture before that client"
    ),
    Fault.REASONING_DROPPED_BY_CLIENT: Diagnosis(
        "the server generated thoughts that are in no field; the client dropped them",
        "store the server's raw reply; the field is `reasoning` in vLLM, `reasoning_content` in SGLang and older vLLM",
    ),
    Fault.REASONING_NOT_VERBATIM: Diagnosis(
        "the reasoning is a summary or encrypted",
        "it cannot be trained on: serve the model yourself and capture token ids",
    ),
    Fault.THINKING_DISABLED: _OFF,
    Reason.PROMPT_CLOSED_THOUGHTS: _OFF,
    Reason.THOUGHTS_NOT_OPENED: Diagnosis(
        "the prompt did not open the thoughts", "check the chat template: with thinking on, Kimi's ends in <think>"
    ),
    Reason.UNCLOSED_THOUGHTS: Diagnosis("the thoughts never end", "check the stop tokens and max_tokens"),
    Reason.FINISH_LENGTH: Diagnosis(
        "the answers were cut at the token limit", "raise max_tokens; Kimi's thoughts often take over 10,000 tokens"
    ),
    Reason.FINISH_ABORT: Diagnosis(
        "the requests were ended early", "raise the client's time-out above the longest generation, and retry"
    ),
    Reason.FINISH_UNKNOWN: Diagnosis(
        "there is no finish reason that says the answer is whole",
        "store the finish reason; a stream must reach its last chunk",
    ),
    Fault.STOPPED_BY_STRING: Diagnosis("a stop string ended the answers", "remove `stop`; the turn ends in <|im_end|>"),
    Fault.ERROR_BODY: Diagnosis("the rows are error replies", "retry those requests; store only successful replies"),
    Fault.UPSTREAM_ERROR: Diagnosis("an error broke the answers off", "retry those requests"),
    Reason.REPLACEMENT_CHARACTER: _DAMAGED,
    Reason.DEGENERATE_REASONING: _ENDLESS,
    Reason.DEGENERATE_ANSWER: _ENDLESS,
    Fault.AMBIGUOUS_SPLIT: _TWO_READINGS,
    Fault.RESIDUAL_THINK_MARKER: _TWO_READINGS,
    Reason.MULTIPLE_THINK_BLOCKS: _TWO_READINGS,
    Fault.CONTENT_REPEATS_REASONING: Diagnosis(
        "the content repeats the reasoning", "find the layer that copies one field into the other"
    ),
    Fault.TOKEN_IDS_UNREADABLE: Diagnosis(
        "the boundary is only in the token ids", "read the file again with the target's tokenizer"
    ),
    Fault.CORRUPT_LINE: Diagnosis("the lines are no JSON", "one JSON object a line; one writer a file"),
    Fault.NOT_A_RESPONSE: Diagnosis("the rows are no responses of a known format", "look at the keys named above"),
}


def diagnose(reasons: Mapping[Code, int], responses: int) -> list[str]:
    """The systematic faults of a file, the most frequent first; one sentence each.

    Args:
        reasons: responses by reason, `ok` included.
        responses: how many there are in all.
    """
    if not responses:
        return ["no responses were found"]
    counts: dict[Diagnosis, int] = {}
    single = 0
    for reason, count in reasons.items():
        if reason is Reason.OK:
            continue
        diagnosis = _DIAGNOSES.get(reason) or Diagnosis(str(reason).replace("_", " "), "see the examples")
        counts[diagnosis] = counts.get(diagnosis, 0) + count
    sentences: list[str] = []
    for diagnosis, count in sorted(counts.items(), key=lambda item: -item[1]):
        if count < _SYSTEMATIC * responses or len(sentences) == _MOST_NAMED:
            single += count
            continue
        sentences.append(f"{_share(count, responses)}: {diagnosis.finding}. {_sentence(diagnosis.change)}")
    if single:
        sentences.append(f"{_share(single, responses)}: single faults, see the table")
    return sentences or [f"all {responses:,} responses are reasoning-complete, as they were captured"]


def _share(count: int, total: int) -> str:
    if count == total:
        return f"all {total:,} rows" if total > 1 else "the one row"
    return f"{count:,} of {total:,} rows ({100 * count / total:.1f}%)"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "." if text[0].isalpha() else text + "."
