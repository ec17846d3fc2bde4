"""What decides a draft model's shape, and how it follows from the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_kimi.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes of a draft model. Its hidden size is the target's, whose embedding it shares."""

    hidden_size: int
    """H, of target and drafter alike."""
    vocab_size: int
    """V, of the target."""
    draft_vocab_size: int
    """D, at most V. Equal to V: no vocabulary map."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the SwiGLU."""
    aux_layer_ids: tuple[int, ...]
    """Boundary numbering: id j is the residual stream entering the target's decoder layer j."""
    target_num_layers: int
    max_position_embeddings: int
    """The serving length, not the training length."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    """None for plain rope, else `{"rope_type": "yarn" | "llama3" | "linear", ...}`."""

    def __post_init__(self) -> None:
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DataError(f"draft_vocab_size is {self.draft_vocab_size}, it must be in 1..{self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise DataError(
                f"{self.num_attention_heads} heads over {self.num_key_value_heads} key/value heads of size "
                f"{self.head_dim}: the first must divide, the size must be even"
            )
        check_aux_layer_ids(self.aux_layer_ids, self.target_num_layers)

    @classmethod
    def for_target(
        cls,
        target: Mapping[str, Any],
        *,
        draft_vocab_size: int,
        aux_layer_ids: tuple[int, ...] | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
    ) -> DrafterConfig:
        """A Llama-style drafter for a target's (text) config; what is given wins over what is derived.

        An MLA target has no head layout to copy: the drafter then has as many heads of the target's value size, and
        plain rope with the target's theta. Engines disagree about the magnitude of Kimi's YaRN on a Llama trunk (its
        `mscale` is read by vLLM, not by SGLang), and plain rope is what both compute alike.
        """
        is_mla = bool(target.get("kv_lora_rank"))
        heads = num_attention_heads or int(target["num_attention_heads"])
        default_size = target.get("v_head_dim") if is_mla else target.get("head_dim")
        theta, scaling = read_rope(target)
        return cls(
            hidden_size=int(target["hidden_size"]),
            vocab_size=int(target["vocab_size"]),
            draft_vocab_size=draft_vocab_size,
            num_attention_heads=heads,
            num_key_value_heads=num_key_value_heads or (heads if is_mla else int(target["num_key_value_heads"])),
            head_dim=head_dim or int(default_size or int(target["hidden_size"]) // heads),
            intermediate_size=intermediate_size or int(target["intermediate_size"]),
            aux_layer_ids=aux_layer_ids or default_aux_layer_ids(int(target["num_hidden_layers"])),
            target_num_layers=int(target["num_hidden_layers"]),
            max_position_embeddings=int(target["max_position_embeddings"]),
            rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=None if is_mla else scaling,
        )


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Boundary ids (2, n // 2, n - 3), as the engines choose them: (2, 30, 58) for Kimi's 61 layers.

    Raises:
        DataError: the formula repeats an id on a model of few layers.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if not 2 < ids[1] < ids[2]:
        raise DataError(
            f"a target of {num_layers} layers has no default aux layers ({ids} repeats or is out of order); "
            "name them, e.g. aux_layer_ids (1, 2, 3) for 4 layers"
        )
    return ids


def check_aux_layer_ids(ids: tuple[int, ...], num_layers: int) -> None:
    """Refuses ids that name no boundary, repeat, or are not low to high.

    Raises:
        DataError: saying which.
    """
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
        raise DataError(
            f"aux_layer_ids {list(ids)} must rise, without repeats, within 0..{num_layers} (boundary numbering)"
        )


def to_output_ids(boundary_ids: Sequence[int]) -> list[int]:
    """SGLang's numbering: boundary j, entering layer j, is the output of layer j - 1."""
    return [layer - 1 for layer in boundary_ids]


def from_output_ids(output_ids: Sequence[int]) -> list[int]:
    """The inverse of `to_output_ids`."""
    return [layer + 1 for layer in output_ids]


def read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling of a model config, from either schema (`rope_parameters`, or `rope_theta` + `rope_scaling`)."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(values.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = values.pop("rope_type", None) or values.get("type") or "default"
    values.pop("type", None)
    return theta, None if kind == "default" else {"rope_type": kind, **values}


def write_rope(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Theta and scaling in both schemas: what `read_rope` reads, for readers of either."""
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else {**scaling, "type": scaling["rope_type"]},
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
    }
