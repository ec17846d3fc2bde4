"""Options of an extraction."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.formats import AuxDtype, FeatureFormat, Targets


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How the states of a data set are computed and encoded, wherever they go."""

    aux_layer_ids: tuple[int, ...] | None = None
    """Boundary numbering, low to high; None takes (2, n // 2, n - 3)."""
    engine: str = "vllm"
    """`vllm`, or `transformers` for a target that fits on one device."""
    tensor_parallel_size: int = 1
    """Processes that share one copy of the target; more processes than that share the data."""
    dtype: str = "auto"
    """Of the target as it runs: `bfloat16`, `float32`, or `auto` (the checkpoint's)."""
    aux_dtype: AuxDtype = "fp8"
    """How aux states are stored: `fp8` (a scale per token and layer, outliers in bf16), `bf16`, or `fp32`."""
    targets: Targets = "topk"
    """What is stored of the target's choices: its `topk` tokens with their log-probabilities, or its final `state`."""
    top_k: int = 64
    """Tokens of a `topk` target."""
    temperature: float | None = None
    """Sampling temperature of the produced tokens, 0 is greedy; None takes the data set's provenance, else 1."""
    protocol: str | None = None
    """Protocol preset that read the spans; None takes the data set's provenance, else detects it."""
    contract_samples: int = 8
    """Samples a group checks against the contract before it writes anything."""
    contract_every: int = 256
    """One of so many later samples is checked too; a failure stops the run, and the store cannot be trained on."""
    max_refused: float = 0.01
    """Share of the samples that may be refused (NaN, wrong length, another target's...) before the run stops."""
    accept_revisions: tuple[str, ...] = ()
    """Revisions in the samples' provenance that are this target's weights under another name."""
    max_shard_bytes: int = 2 << 30
    """Size at which a shard is finished; a killed run extracts the one it was filling again."""
    max_batched_tokens: int = 8192
    """Tokens of one forward pass."""
    max_tokens_in_flight: int = 65536
    """Tokens handed to vLLM and not finished; their states wait in its cache."""
    window: int = 1024
    """Samples sorted by length together."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of `vllm.LLM`, e.g. gpu_memory_utilization, enable_expert_parallel."""

    def __post_init__(self) -> None:
        if self.engine not in ("vllm", "transformers"):
            raise UsageError(f"engine must be vllm or transformers, not {self.engine!r}")
        if self.engine == "transformers" and self.tensor_parallel_size != 1:
            raise UsageError("the transformers engine holds one whole target a process: tensor_parallel_size must be 1")
        positive = (
            "tensor_parallel_size", "contract_samples", "contract_every", "window", "max_shard_bytes",
            "max_batched_tokens",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.max_refused <= 1:
            raise UsageError(f"max_refused is a share between 0 and 1, not {self.max_refused}")

    @property
    def format(self) -> FeatureFormat:
        """Of the store."""
        return FeatureFormat(aux_dtype=self.aux_dtype, targets=self.targets, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class ExtractConfig(CaptureOptions):
    """What to extract, from which target, and how."""

    dataset: Path
    """Folder of a `DatasetDict` (`save_to_disk`) with the splits train and validation."""
    target: str
    """The target model: a folder, a cached Hub name, or `tiny`."""
    output: Path
    """Folder of the feature store; an unfinished one is resumed."""
    revision: str | None = None
    """Of a Hub target."""
    trust_remote_code: bool = False
    """Allow the target's own Python code."""
