"""A finished turn as a row: of the data set if it is complete, of the quarantine if not."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from eagle3_kimi.engines import EngineInfo, Generation
from eagle3_kimi.generation.chains import PlannedTurn
from eagle3_kimi.protocol import ReasoningProtocol, TurnReading
from eagle3_kimi.schema import SCHEMA_VERSION


def build_row(
    turn: PlannedTurn, source: str, generation: Generation, reading: TurnReading, provenance: dict[str, Any]
) -> dict[str, Any]:
    """The row of a complete turn, with the columns of `schema.build_features`."""
    return {
        "id": turn.id,
        "conversation_id": turn.conversation_id,
        "turn": turn.turn,
        "sample_index": turn.sample_index,
        "source": source,
        "conversation": [{"role": m["role"], "content": m.get("content") or ""} for m in turn.messages],
        "prompt_token_ids": generation.prompt_token_ids,
        "output_token_ids": generation.output_token_ids,
        "spans": [{"kind": str(s.kind), "start": s.start, "end": s.end} for s in reading.spans],
        "reasoning": reading.reasoning,
        "content": reading.content,
        "tool_calls": json.dumps([call.as_openai() for call in reading.tool_calls], ensure_ascii=False),
        "finish_reason": generation.finish_reason,
        "num_prompt_tokens": len(generation.prompt_token_ids),
        "num_reasoning_tokens": reading.num_reasoning_tokens,
        "num_output_tokens": len(generation.output_token_ids),
        "token_exact": True,
        "provenance": provenance,
        "schema_version": SCHEMA_VERSION,
    }


def build_quarantine_row(
    turn: PlannedTurn, source: str, generation: Generation, reading: TurnReading, protocol: ReasoningProtocol
) -> dict[str, Any]:
    """The row of a refused turn, with the columns of `schema.build_quarantine_features`."""
    return {
        "id": turn.id,
        "conversation_id": turn.conversation_id,
        "turn": turn.turn,
        "sample_index": turn.sample_index,
        "source": source,
        "reason": str(reading.reason),
        "detail": generation.error or reading.detail,
        "text": protocol.show(generation.output_token_ids),
        "prompt_token_ids": generation.prompt_token_ids,
        "output_token_ids": generation.output_token_ids,
        "finish_reason": generation.finish_reason,
    }


def build_provenance(key: dict[str, Any], model: str, engine: EngineInfo, preset: str, seed: int) -> dict[str, Any]:
    """Where one sample came from; `key` is the journal's."""
    return {
        "model": model,
        "revision": key["target_revision"],
        "engine": engine.name,
        "engine_version": engine.version,
        "protocol": preset,
        "tokenizer_hash": key["tokenizer_hash"],
        "template_hash": key["template_hash"],
        **key["sampling"],
        "seed": seed,
    }


def split_of(conversation_id: str, validation_fraction: float) -> str:
    """`train` or `validation`, by a hash of the conversation: all its turns go together, in every run."""
    value = int(hashlib.sha256(f"split/{conversation_id}".encode()).hexdigest()[:8], 16) / 0x100000000
    return "validation" if value < validation_fraction else "train"
