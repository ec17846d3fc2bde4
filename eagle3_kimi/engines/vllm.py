"""Offline vLLM: the engine's own step loop, so that a finished request is handed on at once."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

from eagle3_kimi.engines.base import (
    EngineInfo,
    EngineOptions,
    Generation,
    GenerationRequest,
    SamplingOptions,
    refuse_long_prompt,
)
from eagle3_kimi.engines.engine_process import spawned_from_here
from eagle3_kimi.errors import EngineError
from eagle3_kimi.target import Target

_CPU_KV_CACHE_GIB = "1"


def prepare_vllm_environment() -> None:
    """Settings vLLM reads from the environment at import; what the person set stays.

    Nothing is sent anywhere, and on a CPU the key-value cache is kept small: its default takes half the memory.
    Processes are spawned: a forked one would keep our files open, and with them the journal's lock.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE_GIB)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def load_llm(target: Target, options: EngineOptions, **arguments: Any) -> Any:
    """A `vllm.LLM` on `target`; every vLLM engine of this package starts here.

    Raises:
        EngineError: vLLM could not start the target.
    """
    prepare_vllm_environment()
    import torch
    from vllm import LLM

    on_cpu = not torch.cuda.is_available()
    if on_cpu and options.dtype == "float32" and "kv_lora_rank" in target.config:
        arguments.setdefault("attention_backend", "CPU_MLA")  # the default on a CPU with AMX takes bfloat16 only
    max_model_len = options.max_model_len
    if max_model_len is None and on_cpu:
        max_model_len = -1  # as long as the small cache carries: the target's own length would need gigabytes
    try:
        with spawned_from_here():
            return LLM(
                model=str(target.path),
                tokenizer=str(target.path),
                trust_remote_code=target.trust_remote_code,
                tensor_parallel_size=options.tensor_parallel_size,
                dtype=options.dtype,
                max_model_len=max_model_len,
                max_num_seqs=options.max_num_seqs,
                gpu_memory_utilization=options.gpu_memory_utilization,
                enforce_eager=on_cpu or bool(arguments.pop("enforce_eager", False)),
                **arguments,
            )
    except (ValueError, RuntimeError, OSError) as error:
        raise EngineError(f"vLLM could not start {target.name} ({target.path}): {error}") from error


def close_llm(llm: Any) -> None:
    """Ends the engine's processes and gives its memory back, so that the next engine can start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with contextlib.suppress(AttributeError):
        llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


class VllmEngine:
    """Generates with an offline vLLM engine; prefix caching stays on.

    Args:
        target: the target model.
        options: where and how it runs.
        arguments: more of `vllm.LLM`, for an engine built upon this one.
    """

    def __init__(self, target: Target, options: EngineOptions, **arguments: Any) -> None:
        import vllm

        self._llm = load_llm(target, options, **{"enable_prefix_caching": True, "seed": 0, **arguments})
        self._max_in_flight = 2 * options.max_num_seqs  # a full step plus one waiting behind it
        platform = self._llm.llm_engine.vllm_config.device_config.device_type
        self.info = EngineInfo(name="vllm", version=vllm.__version__, device=str(platform))

    def generate(
        self, queue: deque[GenerationRequest], sampling: SamplingOptions, stop_token_ids: tuple[int, ...]
    ) -> Iterator[Generation]:
        """See `TargetEngine.generate`."""
        max_model_len = self._llm.llm_engine.model_config.max_model_len
        in_flight: dict[str, GenerationRequest] = {}
        while queue or in_flight:
            while queue and len(in_flight) < self._max_in_flight:
                request = queue.popleft()
                if refused := refuse_long_prompt(request, max_model_len):
                    yield refused
                    continue
                in_flight[request.id] = request
                self._add(request, self._params(sampling, stop_token_ids, request.seed))
            for generation in self._step(in_flight):
                del in_flight[generation.request_id]
                yield generation

    def _add(self, request: GenerationRequest, params: Any) -> None:
        """Hands a request to the engine."""
        self._llm.llm_engine.add_request(request.id, {"prompt_token_ids": request.prompt_token_ids}, params)

    def _step(self, in_flight: dict[str, GenerationRequest]) -> Iterator[Generation]:
        """One step of the engine: those of `in_flight` that it finished."""
        for output in self._llm.llm_engine.step():
            if output.finished:
                request, completion = in_flight[output.request_id], output.outputs[0]
                yield Generation(
                    request_id=request.id,
                    prompt_token_ids=list(output.prompt_token_ids),
                    output_token_ids=list(completion.token_ids),
                    finish_reason=str(completion.finish_reason),
                )

    def _params(self, sampling: SamplingOptions, stop_token_ids: tuple[int, ...], seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop_token_ids=list(stop_token_ids),
            detokenize=False,  # ids are the product; text is decoded once, by the protocol
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def close(self) -> None:
        """Ends the engine."""
        close_llm(self._llm)
        del self._llm
