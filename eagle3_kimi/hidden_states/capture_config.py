"""Options of capturing while generating. Imports no torch: a run that only replays needs none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.formats import FeatureFormat


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """Which states are kept of the samples that are generated, and where. None of it decides a sample."""

    store: Path
    """Folder of the feature store; one that exists is added to."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Boundary numbering, low to high; None takes (2, n // 2, n - 3)."""
    format: FeatureFormat = field(default_factory=FeatureFormat)
    """Of the store."""
    max_shard_bytes: int = 2 << 30
    """Size at which a shard is finished; of a killed run, the one it was filling is captured again."""
    contract_samples: int = 8
    """Samples checked against the contract before any is written."""
    contract_every: int = 256
    """One of so many later samples is checked too."""

    def __post_init__(self) -> None:
        for name in ("max_shard_bytes", "contract_samples", "contract_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
