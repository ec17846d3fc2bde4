"""What a run takes before it starts: disk for each store format, memory per GPU and phase, tokens, time.

Sizes follow from the target's config and are exact to a few percent. Times are estimates: each rests on the named
assumptions alone, and one line of a real run's log is worth more. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.disk import compute_state_bytes
from eagle3_kimi.hidden_states.formats import AuxDtype, FeatureFormat, Targets, bytes_per_token
from eagle3_kimi.target_sizes import TargetSizes

NUM_AUX_LAYERS = 3
AUX_DTYPES: tuple[AuxDtype, ...] = ("fp8", "bf16")
TARGETS: tuple[Targets, ...] = ("topk", "state")
_USABLE = 0.9
_WORKSPACE_BYTES = 4e9
_MEMORY_SHARE, _PREFILL_SHARE, _TRAINING_SHARE = 0.4, 0.35, 0.35
_OPTIMIZER_BYTES = 16
_AUTOCAST_BYTES = 2
_SAMPLE_BYTES_PER_TOKEN = 10
_KEPT_CHECKPOINTS = 3


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A run, and the machine it is planned for."""

    target: TargetSizes
    samples: int
    mean_tokens: int
    """Of a sample: prompt, reasoning and answer."""
    answer_share: float = 0.9
    """Share of the tokens that the target writes, and that are supervised."""
    num_gpus: int = 8
    gpu_bytes: float = 96e9
    gpu_tflops: float = 148.0
    """Dense bf16 of one GPU; an H20 (96 GB) has 148, an H100 989."""
    gpu_bandwidth_tbs: float = 4.0
    """Memory bandwidth of one GPU; an H20 has 4.0 TB/s, an H100 3.35."""
    max_num_seqs: int = 256
    """Sequences decoded side by side, where the cache holds so many."""
    draft_vocab_size: int = 32000
    ttt_steps: int = 7
    epochs: int = 3
    micro_batch_tokens: int = 16384
    """Tokens a GPU trains on at once."""
    trained: DrafterConfig | None = None
    """The drafter; None derives it from the target, as the trainer does."""

    def __post_init__(self) -> None:
        counts = ("samples", "mean_tokens", "num_gpus", "max_num_seqs", "draft_vocab_size", "ttt_steps", "epochs")
        for name in (*counts, "micro_batch_tokens", "gpu_bytes", "gpu_tflops", "gpu_bandwidth_tbs"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 < self.answer_share <= 1:
            raise UsageError(f"answer_share is a share above 0 and at most 1, not {self.answer_share}")

    @property
    def tokens(self) -> int:
        return self.samples * self.mean_tokens

    @property
    def drafter(self) -> DrafterConfig:
        """What is trained."""
        if self.trained is not None:
            return self.trained
        ids = tuple(range(1, NUM_AUX_LAYERS + 1))  # how many counts here, not which
        size = min(self.draft_vocab_size, self.target.vocab_size)
        return DrafterConfig.for_target(self.target.config, draft_vocab_size=size, aux_layer_ids=ids)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase on each GPU."""

    name: str
    memory: Mapping[str, float]
    """Bytes on one GPU, by what they hold."""
    fits: bool
    note: str
    seconds: float | None = None
    """Of the whole run; None where it cannot run, or costs nothing beside another phase."""

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run takes."""

    tensor_parallel_size: int
    """GPUs that share one copy of the target."""
    store_bytes: Mapping[tuple[str, str], float]
    """(aux dtype, targets) -> bytes a token."""
    peers_bytes: float
    """Bytes a token with aux and final states in bf16 at every position, as other trainers keep them."""
    other_disk: Mapping[str, float]
    """Bytes beside the store."""
    phases: tuple[Phase, ...]


def make_plan(request: PlanRequest) -> Plan:
    """Works everything out."""
    tensor_parallel_size = choose_tensor_parallel_size(request)
    return Plan(
        tensor_parallel_size=tensor_parallel_size,
        store_bytes={
            (aux, targets): bytes_per_token(
                request.target.config, FeatureFormat(aux_dtype=aux, targets=targets), request.answer_share
            )
            for aux in AUX_DTYPES
            for targets in TARGETS
        },
        peers_bytes=compute_state_bytes(
            tokens=1, hidden_size=request.target.hidden_size, states=NUM_AUX_LAYERS + 1, bytes_per_value=2
        ),
        other_disk={
            "samples": request.tokens * _SAMPLE_BYTES_PER_TOKEN,
            "checkpoints": _KEPT_CHECKPOINTS * 12 * count_drafter_parameters(request.drafter),
            "exported drafter": 2 * count_drafter_parameters(request.drafter),
        },
        phases=(
            _plan_generation(request, tensor_parallel_size, capture=False),
            _plan_generation(request, tensor_parallel_size, capture=True),
            _plan_extraction(request, tensor_parallel_size),
            _plan_training(request),
            plan_online(request, _tensor_parallel_sizes(request)[-1]),
        ),
    )


def count_drafter_parameters(config: DrafterConfig) -> int:
    """Trained parameters, norms left out; the embedding is the target's, frozen."""
    return sum(_drafter_parts(config).values())


def _drafter_parts(config: DrafterConfig) -> dict[str, int]:
    hidden, head = config.hidden_size, config.head_dim
    return {
        "fc": NUM_AUX_LAYERS * hidden * hidden,
        "keys and values": 2 * hidden * 2 * config.num_key_value_heads * head,
        "rest of the layer": 3 * hidden * config.num_attention_heads * head + 3 * hidden * config.intermediate_size,
        "head": config.draft_vocab_size * hidden,
    }


def choose_tensor_parallel_size(request: PlanRequest) -> int:
    """The fewest GPUs that hold the target and one sample; as many as can share it, if none do."""
    sizes = _tensor_parallel_sizes(request)
    for size in sizes:
        if _free_bytes(request, size) >= request.mean_tokens * request.target.kv_bytes_per_gpu(size):
            return size
    return sizes[-1]


def _tensor_parallel_sizes(request: PlanRequest) -> list[int]:
    """Powers of two that divide the GPUs."""
    return [size for size in (2**i for i in range(10)) if request.num_gpus % size == 0]


def _free_bytes(request: PlanRequest, tensor_parallel_size: int) -> float:
    """Of one GPU, for caches, once the target is there."""
    weights = sum(request.target.weight_bytes.values()) / tensor_parallel_size
    return _USABLE * request.gpu_bytes - weights - _WORKSPACE_BYTES


def _engine_memory(request: PlanRequest, size: int, cache_bytes: float) -> dict[str, float]:
    weights = sum(request.target.weight_bytes.values()) / size
    return {"target": weights, "workspace": _WORKSPACE_BYTES, "cache": max(cache_bytes, 0.0)}


def _capture_bytes(request: PlanRequest) -> float:
    """Bytes a token that wait in each GPU's cache while states are captured."""
    return (NUM_AUX_LAYERS + 1) * request.target.hidden_size * request.target.state_bytes


def _plan_generation(request: PlanRequest, size: int, *, capture: bool) -> Phase:
    target, free = request.target, _free_bytes(request, size)
    per_token = target.kv_bytes_per_gpu(size) + (_capture_bytes(request) if capture else 0.0)
    sequences = min(request.max_num_seqs, int(free / per_token / request.mean_tokens))
    name = "generation with capture (one pass)" if capture else "generation"
    if sequences < 1:
        note = f"no sample of {request.mean_tokens} tokens fits beside the target: more or larger GPUs"
        return Phase(name=name, memory=_engine_memory(request, size, 0.0), fits=False, note=note)
    hit = 1 - (1 - target.experts_per_token / target.num_experts) ** sequences if target.num_experts else 0.0
    weights = target.weight_bytes
    routed = weights.get("routed_experts", 0.0)
    read = (sum(weights.values()) - routed + hit * routed) / size
    read += sequences * request.mean_tokens / 2 * target.kv_bytes_per_gpu(size)
    by_memory = read / (request.gpu_bandwidth_tbs * 1e12 * _MEMORY_SHARE)
    by_compute = 2 * target.active_parameters * sequences / (size * request.gpu_tflops * 1e12 * _PREFILL_SHARE)
    rate = sequences / max(by_memory, by_compute) * request.num_gpus / size
    prompts = _prefill_seconds(request, request.tokens * (1 - request.answer_share))
    return Phase(
        name=name,
        memory=_engine_memory(request, size, free),
        fits=True,
        note=f"{sequences} sequences at once on {size} GPU{'s' * (size > 1)}, {rate:,.0f} tokens/s in all",
        seconds=request.tokens * request.answer_share / rate + prompts,
    )


def _plan_extraction(request: PlanRequest, size: int) -> Phase:
    free = _free_bytes(request, size)
    tokens = free / (request.target.kv_bytes_per_gpu(size) + _capture_bytes(request))
    fits = tokens >= request.mean_tokens
    return Phase(
        name="extraction (second pass)",
        memory=_engine_memory(request, size, free if fits else 0.0),
        fits=fits,
        note=f"{max(tokens, 0):,.0f} tokens in flight; not needed after one pass",
        seconds=_prefill_seconds(request, request.tokens) if fits else None,
    )


def _prefill_seconds(request: PlanRequest, tokens: float) -> float:
    flops = 2 * request.target.active_parameters * tokens
    return flops / (request.num_gpus * request.gpu_tflops * 1e12 * _PREFILL_SHARE)


def _training_memory(request: PlanRequest) -> dict[str, float]:
    config, parameters = request.drafter, count_drafter_parameters(request.drafter)
    frozen = 2 * (config.vocab_size + config.draft_vocab_size) * config.hidden_size
    return {
        "drafter and optimizer": (_OPTIMIZER_BYTES + _AUTOCAST_BYTES) * parameters,
        "target's embedding and head rows": frozen,
        "activations": request.micro_batch_tokens * _activation_bytes(request),
    }


def _activation_bytes(request: PlanRequest) -> float:
    """A token, kept for the backward pass in bf16: the aux states, and of each step its inputs, heads, MLP, output."""
    config = request.drafter
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    step = 5 * config.hidden_size + heads + 3 * config.intermediate_size
    share = (1 + (request.ttt_steps - 1) * request.answer_share) * step  # later steps hold supervised rows only
    return 2 * (NUM_AUX_LAYERS * config.hidden_size + share)


def _plan_training(request: PlanRequest) -> Phase:
    memory = _training_memory(request)
    usable = _USABLE * request.gpu_bytes
    most = max(0, int((usable - sum(memory.values()) + memory["activations"]) / _activation_bytes(request)))
    fits = most >= request.micro_batch_tokens
    return Phase(
        name="training (DDP)",
        memory=memory,
        fits=fits,
        note=f"micro-batches of {request.micro_batch_tokens:,} tokens, at most {most:,} would fit",
        seconds=_training_flops(request) / (request.num_gpus * request.gpu_tflops * 1e12 * _TRAINING_SHARE)
        if fits
        else None,
    )


def _training_flops(request: PlanRequest) -> float:
    """Forward and backward (6 a parameter and row); rows without supervision only give keys and values to step 0."""
    parts, share, steps = _drafter_parts(request.drafter), request.answer_share, request.ttt_steps
    first = parts["fc"] + parts["keys and values"] + share * parts["rest of the layer"]
    later = (steps - 1) * share * (parts["keys and values"] + parts["rest of the layer"])
    head = steps * share * parts["head"] * 4 / 3  # its logits are computed again in the backward pass
    return 6 * (first + later + head) * request.tokens * request.epochs


def plan_online(request: PlanRequest, size: int) -> Phase:
    """Target and drafter on the same GPUs, `size` of which share one copy of the target."""
    memory = {
        **_engine_memory(request, size, 0.0),
        **_training_memory(request),
        "cache": request.mean_tokens * (request.target.kv_bytes_per_gpu(size) + _capture_bytes(request)),
    }
    missing = sum(memory.values()) - _USABLE * request.gpu_bytes
    note = "target and drafter fit together" if missing <= 0 else f"{missing / 1e9:.0f} GB too much for each GPU"
    return Phase(name="online (target and drafter together)", memory=memory, fits=missing <= 0, note=note)


def check_online(request: PlanRequest, size: int) -> float:
    """The share of a GPU's memory that is the target's, where target and drafter are there together.

    Raises:
        UsageError: they do not fit.
    """
    phase = plan_online(request, size)
    if not phase.fits:
        parts = ", ".join(f"{bytes / 1e9:.1f} GB {name}" for name, bytes in phase.memory.items())
        raise UsageError(
            f"{request.target.name} and its drafter need {phase.bytes / 1e9:.0f} GB on each GPU ({parts}); "
            f"{_USABLE:.0%} of {request.gpu_bytes / 1e9:.0f} GB are usable. Train with --max-disk instead of --online, "
            "which takes them in turns, or on more or larger GPUs (`eagle3-kimi plan` counts them)"
        )
    return _USABLE - sum(_training_memory(request).values()) / request.gpu_bytes


def list_assumptions(request: PlanRequest) -> list[str]:
    """Everything that is taken for granted, as sentences."""
    return [
        f"{request.answer_share:.0%} of a sample's tokens are the target's own and supervised",
        f"a GPU has {request.gpu_bytes / 1e9:g} GB (10^9 bytes), {_USABLE:.0%} of it usable, "
        f"{request.gpu_tflops:g} TFLOPS in bf16 and {request.gpu_bandwidth_tbs:g} TB/s",
        f"{_WORKSPACE_BYTES / 1e9:g} GB of each GPU are the engine's workspace",
        f"decoding reaches {_MEMORY_SHARE:.0%} of the bandwidth, prefill {_PREFILL_SHARE:.0%} and training "
        f"{_TRAINING_SHARE:.0%} of the TFLOPS; communication is inside these shares",
        "every sample is complete at the first attempt; attention scores are left out of the arithmetic",
        f"{request.ttt_steps} training-time-test steps, {request.epochs} epochs, draft vocabulary "
        f"{request.drafter.draft_vocab_size:,}, AdamW with float32 master weights, activations kept",
        f"two checkpoints are kept while a third is written; samples take {_SAMPLE_BYTES_PER_TOKEN} bytes a token",
        "the target's own files are not counted as disk to be found",
    ]


def parse_gpus(text: str) -> tuple[int, float]:
    """`8x96GB` -> (8, 96e9).

    Raises:
        UsageError: something else.
    """
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)\s*(?:GB)?", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]) or not float(match[2]):
        raise UsageError(f"GPUs are written like 8x96GB (count, memory of one), not {text!r}")
    return int(match[1]), float(match[2]) * 1e9
