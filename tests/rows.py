"""One complete row of the data set, to be changed by tests."""

from __future__ import annotations

from typing import Any

from eagle3_kimi.schema import PROVENANCE, SCHEMA_VERSION


def complete_row(**changes: Any) -> dict[str, Any]:
    """Output ids 5 6 | 7 | 8 9 | 2: two tokens of reasoning, </think>, two of answer, end of turn."""
    row: dict[str, Any] = {
        "id": "sample-1",
        "conversation_id": "conversation-1",
        "turn": 0,
        "sample_index": 0,
        "source": "test",
        "conversation": [{"role": "user", "content": "hi"}],
        "prompt_token_ids": [1, 2, 3],
        "output_token_ids": [5, 6, 7, 8, 9, 2],
        "spans": [{"kind": "reasoning", "start": 0, "end": 2}, {"kind": "answer", "start": 3, "end": 5}],
        "reasoning": "think",
        "content": "answer",
        "tool_calls": "[]",
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "num_reasoning_tokens": 2,
        "num_output_tokens": 6,
        "token_exact": True,
        "provenance": {name: 0 if "int" in dtype or "float" in dtype else "" for name, dtype in PROVENANCE.items()},
        "schema_version": SCHEMA_VERSION,
    }
    return {**row, **changes}
