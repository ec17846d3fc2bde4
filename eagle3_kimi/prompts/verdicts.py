"""Why a row is refused, and what may be repaired. The values are stored in reports.

Accept: nothing moved (reading an alias of a field is fine). Repair: nothing is lost and there is only one
reading. Everything else is refused, with the field that made it so.
"""

from __future__ import annotations

from enum import StrEnum


class Repair(StrEnum):
    """What was changed in a row that is kept."""

    LEADING_ASSISTANT_DROPPED = "leading_assistant_dropped"
    TRAILING_TURNS_DROPPED = "trailing_turns_dropped"
    EMPTY_SYSTEM_DROPPED = "empty_system_dropped"
    TURN_NAME_DROPPED = "turn_name_dropped"
    CALL_TURNS_MERGED = "call_turns_merged"
    THOUGHTS_SPLIT = "thoughts_split"
    END_OF_TURN_DROPPED = "end_of_turn_dropped"
    TOOL_RESULTS_REORDERED = "tool_results_reordered"
    TOOL_RESULT_WRITTEN_AS_JSON = "tool_result_written_as_json"
    TOOL_CALL_IDS_RENUMBERED = "tool_call_ids_renumbered"
    ARGUMENTS_DECODED_ONCE = "arguments_decoded_once"
    EMPTY_ARGUMENTS_FILLED = "empty_arguments_filled"
    FILLER_NULLS_DROPPED = "schema_filler_nulls_dropped"


class Refusal(StrEnum):
    """Why a row is not kept."""

    INVALID_JSON = "invalid_json"
    UNKNOWN_SHAPE = "unknown_shape"
    MALFORMED_TURN = "malformed_turn"
    UNKNOWN_ROLE = "unknown_role"
    NO_USER_TURN = "no_user_turn"
    NO_TARGET_TURN = "no_target_turn"
    CONSECUTIVE_TURNS = "consecutive_turns"
    EMPTY_USER_TURN = "empty_user_turn"
    EMPTY_ASSISTANT_TURN = "empty_assistant_turn"
    CONTENT_NOT_TEXT = "content_not_text"
    UNSUPPORTED_CONTENT_PART = "unsupported_content_part"
    BROKEN_TEXT = "broken_text"
    MISPLACED_FIELD = "misplaced_field"
    MISSING_REASONING = "missing_reasoning"
    CONFLICTING_REASONING = "conflicting_reasoning"
    AMBIGUOUS_THOUGHTS = "ambiguous_thoughts"
    CONTROL_TOKEN_IN_ANSWER = "control_token_in_answer"
    INVALID_TOOLS = "invalid_tools"
    INVALID_TOOL_CALL = "invalid_tool_call"
    INVALID_TOOL_ARGUMENTS = "invalid_tool_arguments"
    AMBIGUOUS_NULL_ARGUMENT = "ambiguous_null_argument"
    ORPHAN_TOOL_RESULT = "orphan_tool_result"
    MISSING_TOOL_RESULT = "missing_tool_result"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    LEAKED = "overlaps_evaluation_set"
    TOO_LONG = "too_long"


class RowRefused(ValueError):
    """One row is refused; `detail` names the field, what was expected and what came."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
