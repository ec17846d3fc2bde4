"""One sample's features: as tensors of a shard, and what makes them fit for training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.finite import is_finite
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.quantize import CODE_DTYPE, QuantizedStates
from eagle3_kimi.hidden_states.shards import token_digest
from eagle3_kimi.hidden_states.topk import TopTargets
from eagle3_kimi.protocol import Span, SpanKind


@dataclass(frozen=True, kw_only=True)
class FeatureSample:
    """One sample's features. S tokens, P of them prompt; A aux layers, H the target's hidden size.

    What the target says of the next token is there as its final state or as its most likely tokens.
    """

    id: str
    split: str
    """`train` or `validation`."""
    token_ids: Tensor
    """int64 [S], prompt + output."""
    num_prompt_tokens: int
    spans: tuple[Span, ...]
    """Half-open, relative to the output."""
    aux_hidden_states: Tensor | QuantizedStates
    """[S-1, A*H], positions 0..S-2, layers low to high."""
    final_hidden_states: Tensor | None = None
    """[S-1-P, H], positions P..S-2, before the final norm."""
    top_targets: TopTargets | None = None
    """[S-1-P, k], the same positions."""
    target_argmax: Tensor
    """int64 [S-1-P]: the target's own choice at those positions, over its full vocabulary."""

    def check(self, manifest: StoreManifest) -> None:
        """Refuses what is not in the store's format, and shapes, ids or values that training could not use.

        Raises:
            DataError: naming the sample, the field and what was expected.
        """
        self.check_layout(manifest)
        ids = {"token_ids": self.token_ids, "target_argmax": self.target_argmax}
        if fault := find_bad_values({**self.to_tensors(), **ids}.items(), manifest.vocab_size):
            raise DataError(f"sample {self.id}: {fault}")

    def check_layout(self, manifest: StoreManifest) -> None:
        """Looks at names, shapes and dtypes alone.

        Raises:
            DataError: naming the sample, the field and what was expected.
        """
        length, prompt = len(self.token_ids), self.num_prompt_tokens
        if not 1 <= prompt < length:
            raise DataError(f"sample {self.id}: {prompt} prompt tokens of {length} in all; both parts must be there")
        tensors = self.to_tensors()
        expected = tensor_layout(manifest, length, prompt)
        if tensors.keys() != expected.keys():
            raise DataError(
                f"sample {self.id} holds {sorted(tensors)}, a store of {manifest.format} holds {sorted(expected)}"
            )
        for name, (shape, dtype) in expected.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != shape:
                came = tuple(tensor.shape)
                raise DataError(f"sample {self.id}: {name} has shape {came}, {length} tokens need {shape}")
            if tensor.dtype != dtype:
                raise DataError(f"sample {self.id}: {name} is {tensor.dtype}, the store holds {dtype}")

    def to_tensors(self) -> dict[str, Tensor]:
        """Name in the shard -> tensor."""
        tensors = {"token_ids": self.token_ids.to(torch.int32)}
        if isinstance(self.aux_hidden_states, QuantizedStates):
            tensors |= {f"aux_{name}": tensor for name, tensor in self.aux_hidden_states.tensors().items()}
        else:
            tensors["aux_hidden_states"] = self.aux_hidden_states
        if self.top_targets is not None:
            tensors |= {f"top_{name}": tensor for name, tensor in self.top_targets.tensors().items()}
        if self.final_hidden_states is not None:
            tensors["final_hidden_states"] = self.final_hidden_states
            tensors["target_argmax"] = self.target_argmax.to(torch.int32)
        return tensors

    def index_entry(self) -> dict[str, Any]:
        """What the shard's index says of the sample."""
        return {
            "id": self.id,
            "split": self.split,
            "num_tokens": len(self.token_ids),
            "num_prompt_tokens": self.num_prompt_tokens,
            "spans": [[str(span.kind), span.start, span.end] for span in self.spans],
            "tokens": token_digest(self.token_ids),
        }

    @classmethod
    def from_tensors(cls, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> FeatureSample:
        """The sample that `index_entry` and `to_tensors` wrote."""
        named = {prefix: _strip(tensors, prefix) for prefix in ("aux_", "top_")}
        plain = tensors.get("aux_hidden_states")
        top = TopTargets(**named["top_"]) if named["top_"] else None
        return cls(
            id=entry["id"],
            split=entry["split"],
            num_prompt_tokens=entry["num_prompt_tokens"],
            spans=tuple(Span(SpanKind(kind), start, end) for kind, start, end in entry["spans"]),
            token_ids=tensors["token_ids"].to(torch.int64),
            aux_hidden_states=QuantizedStates(**named["aux_"]) if plain is None else plain,
            final_hidden_states=tensors.get("final_hidden_states"),
            top_targets=top,
            target_argmax=(tensors["target_argmax"] if top is None else top.choice).to(torch.int64),
        )


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def tensor_layout(manifest: StoreManifest, length: int, prompt: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of the tensors of a sample of `length` tokens, `prompt` of them prompt.

    In the shard they are named `{id}/{name}`.
    """
    store_format = manifest.format
    inputs, supervised = length - 1, length - 1 - prompt
    num_layers, hidden = len(manifest.aux_layer_ids), manifest.hidden_size
    state_dtype: torch.dtype = getattr(torch, store_format.state_dtype)
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"token_ids": ((length,), torch.int32)}
    if store_format.aux_dtype == "fp8":
        outliers = (inputs, num_layers, min(store_format.num_outliers, hidden))
        layout["aux_codes"] = (inputs, num_layers * hidden), CODE_DTYPE
        layout["aux_scales"] = (inputs, num_layers), torch.float32
        layout["aux_outlier_channels"] = outliers, torch.int16
        layout["aux_outliers"] = outliers, torch.bfloat16
    else:
        layout["aux_hidden_states"] = (inputs, num_layers * hidden), state_dtype
    if store_format.targets == "topk":
        k = min(store_format.top_k, manifest.vocab_size)
        layout["top_ids"] = (supervised, k), torch.int32
        layout["top_log_probs"] = (supervised, k), torch.float16
        layout["top_tail_mass"] = (supervised,), torch.float32
    else:
        layout["final_hidden_states"] = (supervised, hidden), state_dtype
        layout["target_argmax"] = (supervised,), torch.int32
    return layout


def find_bad_values(named: Iterable[tuple[Any, Tensor]], vocab_size: int) -> str:
    """What is wrong with the values of one sample's tensors, or of many samples' together; empty if they are good.

    Args:
        named: what to call a tensor, and the tensor; integers of 32 and 64 bits are token ids.
        vocab_size: the target's.
    """
    for name, tensor in named:
        if tensor.dtype.is_floating_point:
            if not _holds_numbers(tensor):
                return f"{name} holds NaN or infinite values"
        elif tensor.dtype in (torch.int32, torch.int64) and tensor.numel():
            lowest, highest = tensor.aminmax()
            if not 0 <= int(lowest) <= int(highest) < vocab_size:
                return f"{name} leaves the target's vocabulary of {vocab_size}"
    return ""


def _holds_numbers(tensor: Tensor) -> bool:
    if tensor.dtype == CODE_DTYPE:  # e4m3fn has no infinity, and NaN in two codes
        return not bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    return is_finite(tensor)
