"""How a feature store keeps states, and what that costs. Imports no torch: planning needs it too.

Kimi-K2.5, three aux layers of 7168 values, bytes a token where all tokens are supervised:

    aux         fp8    3 x (7168 codes + a scale of 4 + 16 outliers of 4)   21,708
                bf16   3 x 7168 x 2                                         43,008
    targets     topk   64 x (id of 4 + log-probability of 2) + tail of 4       388
                state  7168 x 2 + choice of 4                               14,340
    token ids                                                                    4

So the default, fp8 with topk, takes 22,100, and bf16 with state 57,352.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eagle3_kimi.errors import UsageError

AuxDtype = Literal["fp8", "bf16", "fp32"]
Targets = Literal["topk", "state"]
_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class FeatureFormat:
    """What the shards of a store hold of a token."""

    aux_dtype: AuxDtype = "fp8"
    """Of the aux states. `fp8`: e4m3 with a scale per token and layer; `fp32` keeps a float32 target exactly."""
    targets: Targets = "topk"
    """`topk`: the target's most likely tokens; `state`: its final state, as bf16 unless the aux states are fp32."""
    top_k: int = 64
    """Tokens a `topk` target keeps."""
    num_outliers: int = 16
    """Largest values of a token and layer that `fp8` keeps in bf16 beside their channel."""

    def __post_init__(self) -> None:
        for name, known in (("aux_dtype", ("fp8", "bf16", "fp32")), ("targets", ("topk", "state"))):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.top_k < 1 or self.num_outliers < 0:
            raise UsageError(f"top_k must be at least 1 and num_outliers 0, not {self.top_k} and {self.num_outliers}")

    @property
    def state_dtype(self) -> str:
        """Name in torch of the dtype of states that are not quantised."""
        return "float32" if self.aux_dtype == "fp32" else "bfloat16"

    def __str__(self) -> str:
        aux = f"fp8 with {self.num_outliers} outliers" if self.aux_dtype == "fp8" else self.aux_dtype
        return f"aux {aux}, targets {f'top {self.top_k}' if self.targets == 'topk' else 'state'}"


def bytes_per_token(
    config: Mapping[str, Any],
    feature_format: FeatureFormat,
    supervised_fraction: float = 1.0,
    *,
    num_aux_layers: int = 3,
) -> float:
    """Bytes a token in the shards; a sample adds about a kilobyte of names and index.

    Args:
        config: the target's text configuration: `hidden_size` and `vocab_size` are read.
        feature_format: of the store.
        supervised_fraction: share of the tokens in the answers, reasoning included.
        num_aux_layers: captured layers.
    """
    hidden, token_id, scale, channel = int(config["hidden_size"]), 4, 4, 2
    aux_layer = hidden * _BYTES[feature_format.aux_dtype]
    if feature_format.aux_dtype == "fp8":
        aux_layer += scale + min(feature_format.num_outliers, hidden) * (channel + _BYTES["bf16"])
    if feature_format.targets == "topk":
        log_prob, tail_mass = 2, 4
        target = min(feature_format.top_k, int(config["vocab_size"])) * (token_id + log_prob) + tail_mass
    else:
        target = hidden * (4 if feature_format.state_dtype == "float32" else 2) + token_id
    return token_id + num_aux_layers * aux_layer + supervised_fraction * target
