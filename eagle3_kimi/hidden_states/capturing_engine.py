"""The vLLM engine that hands the hidden states of an answer over with it: no second pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from eagle3_kimi.engines import Generation, GenerationRequest
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.vllm import VllmEngine
from eagle3_kimi.errors import EngineError
from eagle3_kimi.hidden_states.capture import connector_arguments
from eagle3_kimi.hidden_states.sink import CAPTURE_KEY, DROP_CUT_KEY, CapturedStates
from eagle3_kimi.hidden_states.state_channel import StateChannel
from eagle3_kimi.target import Target

_CPU_STEP_TOKENS = 8192
"""Tokens of a step at least: MLA on a CPU prefills in one piece, and what is longer would wait for ever."""


@dataclass(frozen=True, kw_only=True)
class CapturedGeneration(Generation):
    """A finished turn with its states."""

    states: CapturedStates


class CapturingVllmEngine(VllmEngine):
    """Generates as `VllmEngine` does; what ended by itself comes as a `CapturedGeneration`.

    A prefix that is cached is not computed and would have no states, so nothing is cached. States and answers come
    from the engine's process on ways of their own, a few steps apart, and are paired here. A request with a
    `known_output` is a prefill: its states are those of that output.

    Args:
        target: the target model.
        options: where and how it runs.
        layer_ids: boundaries to capture, low to high.
    """

    def __init__(self, target: Target, options: EngineOptions, layer_ids: tuple[int, ...]) -> None:
        self._channel = StateChannel()
        self._finished: dict[str, Generation] = {}
        self._states: dict[str, CapturedStates] = {}
        arguments = connector_arguments(layer_ids, self._channel.name)
        arguments["scheduler_cls"] = "eagle3_kimi.hidden_states.draftless.DraftlessScheduler"
        arguments["async_scheduling"] = False
        self._on_cpu = not torch.cuda.is_available()
        if self._on_cpu:
            # vLLM keeps a core more for connectors between machines; a worker without it shares one with its scheduler
            os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", str(options.tensor_parallel_size))
            arguments["max_num_batched_tokens"] = max(_CPU_STEP_TOKENS, options.max_model_len or 0)
        with ExitStack() as unless_started:
            unless_started.callback(self._channel.close)
            super().__init__(target, options, **arguments)
            unless_started.pop_all()

    def _add(self, request: GenerationRequest, params: Any) -> None:
        known = request.known_output
        params.extra_args = {"kv_transfer_params": {CAPTURE_KEY: request.id, DROP_CUT_KEY: known is None}}
        if known is None:
            super()._add(request, params)
            return
        token_ids, config = [*request.prompt_token_ids, *known], self._llm.llm_engine.vllm_config
        longest = config.model_config.max_model_len
        if self._on_cpu:
            longest = min(longest, config.scheduler_config.max_num_batched_tokens)
        if len(token_ids) > longest:
            raise EngineError(
                f"sample {request.id} has {len(token_ids)} tokens, the engine takes {longest}: raise max_model_len"
            )
        params.max_tokens = 1
        self._llm.llm_engine.add_request(request.id, {"prompt_token_ids": token_ids[:-1]}, params)

    def _step(self, in_flight: dict[str, GenerationRequest]) -> Iterator[Generation]:
        running = self._llm.llm_engine.has_unfinished_requests()
        if running:
            for generation in super()._step(in_flight):
                request = in_flight[generation.request_id]
                if request.known_output is not None:
                    generation = _known_generation(request, request.known_output)
                if generation.finish_reason == "stop":
                    self._finished[generation.request_id] = generation
                else:
                    yield generation
        self._states.update((states.id, states) for states in self._channel.take(wait=not running))
        for request_id in self._states.keys() & self._finished.keys():
            yield CapturedGeneration(**vars(self._finished.pop(request_id)), states=self._states.pop(request_id))

    def close(self) -> None:
        """Ends the engine."""
        super().close()
        self._channel.close()


def _known_generation(request: GenerationRequest, known_output: list[int]) -> Generation:
    return Generation(
        request_id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=known_output,
        finish_reason="stop",
    )
