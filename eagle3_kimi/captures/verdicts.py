"""What is said about a captured response: accept, repair or reject, and why.

Accept: no text moved between fields (reading an alias name is fine). Repair: lossless, and only one
reading. Everything else is refused, with its own reason. Where a reason means the same as one of the
token grammar, it is `protocol.Reason`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from eagle3_kimi.protocol import Reason


class Verdict(StrEnum):
    """What may be done with a response."""

    ACCEPT = "accept"
    REPAIR = "repair"
    REJECT = "reject"


class Repair(StrEnum):
    """What was changed in a response that is kept."""

    SPLIT_INLINE_THINK = "split_inline_think"
    SPLIT_PREFILLED_THINK = "split_prefilled_think"
    SPLIT_REASONING_FIELD = "split_reasoning_field"
    STRIPPED_THINK_TAGS = "stripped_think_tags"
    STRIPPED_END_OF_TURN = "stripped_end_of_turn"
    REASONING_DETAILS_JOINED = "reasoning_details_joined"
    REASONING_PARTS_MOVED = "reasoning_parts_moved"
    TOOL_SECTION_CUT_FROM_REASONING = "tool_section_cut_from_reasoning"
    TOOL_SECTION_PARSED_FROM_CONTENT = "tool_section_parsed_from_content"
    TOOL_ARGUMENTS_DECODED_ONCE = "tool_arguments_decoded_once"
    SURROGATES_JOINED = "surrogates_joined"
    RESPLIT_FROM_TOKEN_IDS = "resplit_from_token_ids"
    REDECODED_FROM_TOKEN_IDS = "redecoded_from_token_ids"
    DUPLICATE_DROPPED = "duplicate_dropped"
    TORN_TAIL_DROPPED = "torn_tail_dropped"
    JOINED_LINES_SPLIT = "joined_lines_split"


class Fault(StrEnum):
    """Why a captured response is refused, beyond the faults of the token grammar (`protocol.Reason`)."""

    NOT_A_RESPONSE = "not_a_response"
    NO_CHOICES = "no_choices"
    ERROR_BODY = "error_body"
    UPSTREAM_ERROR = "upstream_error"
    REFUSAL = "refusal"
    WRONG_ROLE = "wrong_role"
    WRONG_TYPE = "wrong_type"
    UNKNOWN_PART = "unknown_part"
    CONTENT_FILTER = "content_filter"
    STOPPED_BY_STRING = "stopped_by_string"
    CONFLICTING_FINISH = "conflicting_finish"
    MIXED_STREAM = "mixed_stream"
    THINKING_DISABLED = "thinking_disabled"
    MISSING_REASONING = "missing_reasoning"
    REASONING_DROPPED_BY_CLIENT = "reasoning_dropped_by_client"
    REASONING_NOT_VERBATIM = "reasoning_not_verbatim"
    PLACEHOLDER_REASONING = "placeholder_reasoning"
    CONFLICTING_REASONING_FIELDS = "conflicting_reasoning_fields"
    AMBIGUOUS_SPLIT = "ambiguous_split"
    RESIDUAL_THINK_MARKER = "residual_think_marker"
    CONTENT_REPEATS_REASONING = "content_repeats_reasoning"
    PROMPT_ECHOED = "prompt_echoed"
    CONFLICTING_TOOL_CALLS = "conflicting_tool_calls"
    TOOL_CALLS_MISSING = "tool_calls_missing"
    INVALID_TOOL_CALL = "invalid_tool_call"
    UNKNOWN_TOOL = "unknown_tool"
    LONE_SURROGATE = "lone_surrogate"
    TOKEN_IDS_UNREADABLE = "token_ids_unreadable"
    CORRUPT_LINE = "corrupt_line"
    PROMPTS_DO_NOT_MATCH = "prompts_do_not_match"
    EMPTY_FILE = "empty_file"


Code = Reason | Repair | Fault


class Refused(Exception):
    """One response is refused; caught where the verdict is made."""

    def __init__(self, reason: Reason | Fault, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(slots=True, kw_only=True)  # not frozen: one is made for every response
class CaptureVerdict:
    """The verdict on one choice of one response."""

    verdict: Verdict
    reason: Code
    """`ok`, the first repair, or why it is refused."""
    detail: str = ""
    """For a person: what was expected and what came."""
    reasoning: str | None = None
    """Stripped of outer white space; None when refused."""
    content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's shape, arguments as JSON text."""
    repairs: tuple[Repair, ...] = ()
    format: str = ""
    """The guessed format of the record (`openai.chat.completion`, `sglang.generate`, ...)."""
    choice_index: int = 0
    finish_reason: str | None = None
    token_exact: bool = False
    """True where output token ids were there and decided; text alone cannot be re-tokenised exactly."""
    prompt: Any = None
    """What was asked, as the record holds it: text or messages."""
    prompt_token_ids: list[int] | None = None
    output_token_ids: list[int] | None = None

    @property
    def complete(self) -> bool:
        return self.verdict is not Verdict.REJECT


_RANK = {Verdict.ACCEPT: 0, Verdict.REPAIR: 1, Verdict.REJECT: 2}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several verdicts; `accept` where there are none."""
    return max(verdicts, key=_RANK.__getitem__, default=Verdict.ACCEPT)
