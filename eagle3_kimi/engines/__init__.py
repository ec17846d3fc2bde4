"""Target engines behind one small interface: token ids in, token ids out."""

from __future__ import annotations

from eagle3_kimi.engines.base import (
    EngineInfo,
    Generation,
    GenerationRequest,
    SamplingOptions,
    TargetEngine,
    check_engine_available,
    open_engine,
)

__all__ = [
    "EngineInfo",
    "Generation",
    "GenerationRequest",
    "SamplingOptions",
    "TargetEngine",
    "check_engine_available",
    "open_engine",
]
