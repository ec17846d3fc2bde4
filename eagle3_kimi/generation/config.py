"""What decides a generated sample, and the fingerprints that follow from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3_kimi.engines import SamplingOptions
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.schema import SCHEMA_VERSION
from eagle3_kimi.target import Target

PROTOCOL_VERSION = 2
"""Raised when the completeness rules change: journals of older rules are not replayed."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Everything about a generation run but the prompts."""

    target: str
    """Folder, Hub name in the local cache, or `tiny`."""
    revision: str | None = None
    """Hub commit, branch or tag of the target."""
    trust_remote_code: bool = False
    """Runs the target's own tokenizer code (Kimi-K2.5 needs it)."""
    engine: str = "vllm"
    """`vllm` (offline), `transformers` or `server`."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0
    """Seed of the run; each request's own is derived from it and the sample's id."""
    samples_per_prompt: int = 1
    """Independent generations of each conversation."""
    min_reasoning_tokens: int = 1
    """A shorter reasoning is refused."""
    validation_fraction: float = 0.05
    """Share of conversations, by hash, in the split `validation`."""
    journal_dir: Path | None = None
    """Where journals live; None is the cache folder. Decides no row."""
    retry_rejected: bool = False
    """Generates again what the journal holds as refused. Decides no row."""
    max_truncated: float = 0.5
    """Largest share of truncated samples in the breaker's window."""
    max_incomplete: float = 0.2
    """Largest share of otherwise incomplete samples in the breaker's window."""
    breaker_window: int = 200
    """Finished samples the circuit breaker looks back on."""
    options: EngineOptions = field(default_factory=EngineOptions)
    """Where the engine runs. Decides no row."""
    capture: CaptureConfig | None = None
    """Keeps the hidden states of complete samples as they are generated. Decides no row."""

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 1:
            raise UsageError(f"samples_per_prompt must be at least 1, got {self.samples_per_prompt}")
        if not 0 <= self.validation_fraction < 1:
            raise UsageError(f"validation_fraction must lie in [0, 1), got {self.validation_fraction}")
        if self.engine == "server" and not self.options.server_url:
            raise UsageError("the server engine needs server_url, for example http://127.0.0.1:8000")
        if self.capture is not None and self.engine != "vllm":
            raise UsageError(
                f"only the vllm engine captures hidden states while it generates, not {self.engine}: leave "
                "capture_hidden_states out, and extract them afterwards (train/extract_hidden_states.py)"
            )


def journal_key(config: GenerationConfig, target: Target, tokenizer: Any) -> dict[str, Any]:
    """What a journaled sample depends on besides its own prompt. Adding a prompt does not change it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "protocol_version": PROTOCOL_VERSION,
        "target_revision": target.revision,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": text_hash(tokenizer.chat_template),
        "engine": config.engine,
        "sampling": asdict(config.sampling),
        "seed": config.seed,
        "min_reasoning_tokens": config.min_reasoning_tokens,
    }


def fingerprint(key: Any) -> str:
    """Short digest of a JSON-able key."""
    return text_hash(json.dumps(key, sort_keys=True, ensure_ascii=False))


def text_hash(text: str | None) -> str:
    """First 16 hex digits of the SHA-256 of `text`."""
    return hashlib.sha256((text or "").encode("utf-8", "surrogatepass")).hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str:
    """Digest of what encoding depends on: the vocabulary with its ids, or the whole fast tokenizer."""
    if getattr(tokenizer, "is_fast", False):
        return text_hash(tokenizer.backend_tokenizer.to_str())
    return fingerprint(sorted(tokenizer.get_vocab().items()))


def request_seed(run_seed: int, sample_id: str, attempt: int = 0) -> int:
    """Seed of one request, below 2**31 since not every engine takes more. A retry has a seed of its own."""
    key = f"{run_seed}/{sample_id}" + (f"/{attempt}" if attempt else "")
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) & 0x7FFFFFFF
