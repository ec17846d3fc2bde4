"""Everything that decides a training run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.config import CaptureOptions
from eagle3_kimi.hidden_states.disk import parse_size


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run of the drafter."""

    store: Path | None = None
    """Folder of the feature store, written by train/extract_hidden_states.py; with `max_disk`, where its parts come and
    go (None: OUTPUT/parts)."""
    target: str
    """The target model: a folder, a Hub name in the local cache, or `tiny`."""
    output: Path
    """Run folder: config.yaml, metrics.jsonl, checkpoints/, export/, training.json."""
    expected_world_size: int = 1
    """Number of processes the launcher must have started; another number stops the run."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: autocast over float32 master weights."""

    draft_vocab_size: int | None = None
    """Most frequent target ids the drafter may propose; None: all of them."""
    force_markers: bool = True
    """The think, end-of-turn and tool markers are among them however rare; false for a target without such markers."""
    num_attention_heads: int | None = None
    """None: the target's."""
    num_key_value_heads: int | None = None
    """None: the target's; as many as heads for an MLA target."""
    head_dim: int | None = None
    """None: the target's; its value size for an MLA target."""
    intermediate_size: int | None = None
    """None: the target's dense one."""

    ttt_steps: int = 7
    """K, steps of the training-time test; at least the draft length at serving time."""
    ttt_step_decay: float = 0.8
    """Step k weighs decay^k, normalised (EAGLE-3)."""
    objective: Literal["cross_entropy", "total_variation", "log_acceptance"] = "cross_entropy"
    """What a row is trained for."""
    head_chunk: int = 1024
    """Target positions whose logits exist at once."""

    epochs: int = 10
    """Passes over the training split."""
    max_steps: int | None = None
    """Stops earlier, the schedule with it; 0 exports the untrained drafter."""
    batch_tokens: int = 65536
    """Tokens of an optimizer step, over all ranks and micro-batches."""
    micro_batch_tokens: int = 16384
    """Tokens a process holds at once."""
    max_length: int = 16384
    """Longer samples are refused whole and counted, never truncated; at most `micro_batch_tokens`."""
    num_workers: int = 0
    """Processes per rank that read ahead."""

    learning_rate: float = 1e-4
    """Peak of the schedule."""
    warmup_ratio: float = 0.04
    """Share of the steps with a linearly rising rate; a cosine to zero follows."""
    weight_decay: float = 0.0
    """AdamW, decoupled."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    seed: int = 0
    """Of weights and order."""

    checkpoint_every: int = 500
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 2
    """Older ones are deleted."""
    log_every: int = 10
    """Optimizer steps between lines of metrics.jsonl."""
    tracker: Literal["tensorboard", "wandb", "trackio", "none"] | None = None
    """Where the figures are drawn, besides metrics.jsonl; None: tensorboard where it is installed."""
    evaluate_every: int = 0
    """Optimizer steps between evaluations on the validation split; 0: only at the end."""
    trust_remote_code: bool = False
    """Lets the target's own tokenizer code run."""

    def __post_init__(self) -> None:
        if self.max_length > self.micro_batch_tokens:
            raise UsageError(
                f"max_length {self.max_length} is above micro_batch_tokens {self.micro_batch_tokens}: a sample of that "
                "length would not fit a micro-batch; raise one or lower the other"
            )
        positive = (
            "ttt_steps",
            "epochs",
            "batch_tokens",
            "head_chunk",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, it must be at least 1")

    def as_plain(self) -> dict[str, Any]:
        """Plain values, for config.yaml."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**plain, "betas": list(self.betas)}

    def identity(self, store_fingerprint: str, target_revision: str) -> str:
        """Digest of what the trained weights depend on: the same run may resume on other machines and world sizes."""
        loose = {
            "store", "target", "output", "expected_world_size", "micro_batch_tokens", "num_workers", "head_chunk",
            "checkpoint_every", "keep_checkpoints", "log_every", "evaluate_every", "tracker", "trust_remote_code",
        }  # fmt: skip
        plain = self.as_plain()
        strict = {item.name: plain[item.name] for item in fields(self) if item.name not in loose}
        text = json.dumps([strict, store_fingerprint, target_revision], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


@dataclass(frozen=True, kw_only=True)
class LiveOptions(CaptureOptions):
    """Training on a data set whose hidden states are made on the way, instead of on a whole feature store."""

    dataset: Path | None = None
    """Folder of a `DatasetDict` (`save_to_disk`); goes with `max_disk` or `online`."""
    max_disk: str | None = None
    """Disk that hidden states may take at once, such as 500GB: they are extracted, trained on and deleted in parts."""
    online: bool = False
    """Nothing is written: each step's states go from the target to the trainer, which must fit on the GPUs together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dataset is not None) != (self.max_disk is not None or self.online):
            raise UsageError(
                "--dataset goes with --max-disk SIZE or --online, which make its hidden states while training; a store "
                "that is there already is trained on with --store alone"
            )
        idle = [item.name for item in fields(CaptureOptions) if getattr(self, item.name) != _default_of(item)]
        if self.dataset is None and idle:
            raise UsageError(f"{', '.join(idle)} have no effect on a store that is there: leave them out")
        if self.max_disk is not None and self.online:
            raise UsageError("--max-disk keeps parts on the disk, --online keeps nothing: choose one")
        if self.max_disk is not None:
            parse_size(self.max_disk)

    def as_plain(self) -> dict[str, Any]:
        """Plain values, for config.yaml; none where the run has a store."""
        if self.dataset is None:
            return {}
        return {**asdict(self), "dataset": str(self.dataset)}
