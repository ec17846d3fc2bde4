"""vLLM KV connector that hands hidden states to a sink: no files, no locks.

With `method: extract_hidden_states` vLLM keeps the captured layers of every token in a cache-only
KV cache group. When a request finishes, the scheduler's half of this connector keeps its blocks;
in the next step the worker's half copies the rows out, and in the step after that hands them over
and lets the blocks go:

    step i      request finishes        scheduler: remember blocks, delay freeing
    step i + 1  connector metadata      worker: start the copy (own stream, pinned memory on CUDA)
    step i + 2                          worker: wait for the copy, fill the sink, report finished

Under `external_launcher` every tensor-parallel rank has a scheduler of its own, and they stay in
step only while they decide alike. So the blocks are freed at a fixed step, on every rank, and never
by asking whether a copy happens to be done; the ranks that copy nothing report all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.request import RequestStatus

from eagle3_kimi.errors import EngineError
from eagle3_kimi.hidden_states.sink import (
    CAPTURE_KEY,
    CHANNEL_PREFIX,
    DROP_CUT_KEY,
    CapturedStates,
    Sink,
    find_sink,
    pinned_like,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_FINISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""Requests that ran to their end; the second ones were cut at their longest, as a prefill is after one token."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request whose blocks wait to be copied."""

    request_id: str
    capture_id: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """What the scheduler tells the worker in a step."""

    requests: list[FinishedRequest] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Copy:
    request_id: str
    states: CapturedStates
    done: torch.cuda.Event | None


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector; see the module's docstring. The first tensor-parallel rank copies all layers.

    The others copy the last one where the sink is in their own process, so that they can help with the target's head.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group, self._block_size = _find_group(kv_cache_config)
        # scheduler's half
        self._finished: list[FinishedRequest] = []
        # worker's half
        self._sink: Sink | None = None
        self._cache: Tensor | None = None
        self._layers: slice | None = None  # None: it copies nothing
        self._copying: list[_Copy] = []
        self._stream: torch.cuda.Stream | None = None

    # ---- scheduler ----

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks of a request that asked for its states; True delays their freeing."""
        params = request.kv_transfer_params or {}
        capture_id = params.get(CAPTURE_KEY)
        wanted = _FINISHED[: 1 if params.get(DROP_CUT_KEY) else 2]
        if capture_id is None or request.status not in wanted or self._group >= len(block_ids):
            return False, None
        token_ids = tuple(request.all_token_ids)[:-1]  # the last token was sampled, never an input
        self._finished.append(FinishedRequest(request.request_id, capture_id, token_ids, tuple(block_ids[self._group])))
        return True, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FinishedRequests:
        """Hands the finished requests to the worker and forgets them."""
        metadata, self._finished = FinishedRequests(self._finished), []
        return metadata

    def get_finished_count(self) -> int:
        """Where an executor gathers several workers, the report of one is enough."""
        return 1

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Finds the cache that holds the captured layers: [blocks, L, block size, H]."""
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise EngineError(f"expected one hidden-states cache in vLLM, found {sorted(layers) or 'none'}")
        self._cache = kv_caches[next(iter(layers))]
        if self._cache.shape[2] != self._block_size:
            raise EngineError(
                f"vLLM's hidden-states cache has blocks of {self._cache.shape[2]} tokens, its configuration says "
                f"{self._block_size}; reading it would mix tokens up, so this version of vLLM is not supported"
            )
        is_first = get_tensor_model_parallel_rank() == 0
        sink_name: str = self._kv_transfer_config.get_from_extra_config("sink", "")
        self._sink = find_sink(sink_name, sends=is_first)  # fail at start, not at the first sample
        if is_first:
            self._layers = slice(None)
        elif not sink_name.startswith(CHANNEL_PREFIX):
            self._layers = slice(-1, None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Hands over the copies started a step ago, and starts those of this step."""
        ready, self._copying = self._copying, []
        for copy in ready:
            assert self._sink is not None  # register_kv_caches ran before the first step
            if copy.done is not None:
                copy.done.synchronize()
            self._sink.put(copy.states)
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        if isinstance(metadata, FinishedRequests):
            self._copying = [self._start_copy(request) for request in metadata.requests]
        return {copy.request_id for copy in ready} or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The cache-only layer has stored the states already."""

    def wait_for_save(self) -> None:
        """Blocks are kept until the copy is done, so the forward pass need not wait."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """All layers of a token lie together."""
        return "LBNHC"

    def _start_copy(self, request: FinishedRequest) -> _Copy:
        token_ids = torch.tensor(request.token_ids, dtype=torch.int64)
        if self._layers is None:
            return _Copy(request.request_id, CapturedStates(request.capture_id, token_ids, None), None)
        assert self._cache is not None  # register_kv_caches ran before the first step
        if self._cache.device.type != "cuda":
            rows = self._read_rows(request)
            return _Copy(request.request_id, CapturedStates(request.capture_id, token_ids, rows), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._cache.device)
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            rows = self._read_rows(request)
            on_cpu = pinned_like(rows)
            on_cpu.copy_(rows, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Copy(request.request_id, CapturedStates(request.capture_id, token_ids, on_cpu), done)

    def _read_rows(self, request: FinishedRequest) -> Tensor:
        """[S-1, L, H] or [S-1, 1, H]: slot i of the request lies in its block i // block size, at i % block size."""
        assert self._cache is not None
        assert self._layers is not None
        blocks = torch.tensor(request.block_ids, device=self._cache.device)
        positions = torch.arange(len(request.token_ids), device=self._cache.device)
        return self._cache[blocks[positions // self._block_size], self._layers, positions % self._block_size]


def _find_group(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Index of the KV cache group of the captured states, and tokens in one of its blocks.

    Beside an MLA target the cache shares one group with the attention layers, of which the scheduler
    is told the first layer only; elsewhere it has a group of its own.
    """
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(groups) == 1:
        return 0, groups[0].block_size
    found = [index for index, spec in enumerate(groups) if isinstance(spec, HiddenStateCacheSpec)]
    if len(found) != 1:
        raise EngineError(
            f"expected one KV cache group with hidden states in vLLM, found {len(found)} among {len(groups)}; "
            "the connector works with speculative method extract_hidden_states only"
        )
    return found[0], groups[found[0]].block_size
