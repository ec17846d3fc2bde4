"""What a feature store holds: its manifest and one sample's features, with their checks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.shards import write_json
from eagle3_kimi.protocol import Span

STORE_SCHEMA_VERSION = 1
MANIFEST_NAME = "store.json"
TENSORS = ("token_ids", "aux_hidden_states", "final_hidden_states", "target_argmax")
"""Tensors of a sample in its shard, named `{id}/{name}`."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAY_CHANGE = {"contract", "dataset_fingerprint"}


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """What all shards of a store have in common; `store.json`."""

    schema_version: int = STORE_SCHEMA_VERSION
    target: str
    target_revision: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    """Boundary numbering: id j is the residual stream entering decoder layer j."""
    dtype: str
    """`float32` or `bfloat16`, of the hidden states."""
    final_pre_norm: bool = True
    """True: the final state is the last layer's output before the final norm."""
    dataset_fingerprint: str
    """Digest of ids and token ids of the data set the states belong to."""
    protocol: str
    """Name of the protocol preset that read the spans."""
    contract: dict[str, Any] | None = None
    """`{"passed": bool, "agreement": float, ...}` once the contract check ran."""

    def save(self, path: Path) -> None:
        """Writes `store.json` into the folder `path`."""
        write_json(path / MANIFEST_NAME, asdict(self))

    @classmethod
    def load(cls, path: Path) -> StoreManifest:
        """Reads `store.json` from the folder `path`.

        Raises:
            DataError: there is none, or another version of this package wrote it.
        """
        file = path / MANIFEST_NAME
        if not file.is_file():
            raise DataError(f"{path} is not a feature store: it has no {MANIFEST_NAME}")
        values = json.loads(file.read_text(encoding="utf-8"))
        if values.get("schema_version") != STORE_SCHEMA_VERSION:
            raise DataError(
                f"{file} has schema_version {values.get('schema_version')}, this version reads {STORE_SCHEMA_VERSION}; "
                "extract again into another folder, or use the version that wrote it"
            )
        return cls(**{**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})

    def check_same_store(self, other: StoreManifest, path: Path) -> None:
        """Refuses to mix what belongs to another target, revision, layer ids or dtype.

        Raises:
            DataError: naming the first field that differs.
        """
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name not in _MAY_CHANGE and mine != theirs:
                raise DataError(
                    f"the store {path} was made with {item.name} {mine!r}, this run has {theirs!r}; "
                    "a mixed store is never made: choose another output folder"
                )


@dataclass(frozen=True, kw_only=True)
class FeatureSample:
    """One sample's features. S tokens, P of them prompt; A aux layers, H the target's hidden size."""

    id: str
    split: str
    """`train` or `validation`."""
    token_ids: Tensor
    """int64 [S], prompt + output."""
    num_prompt_tokens: int
    spans: tuple[Span, ...]
    """Half-open, relative to the output."""
    aux_hidden_states: Tensor
    """[S-1, A*H], positions 0..S-2, layers low to high."""
    final_hidden_states: Tensor
    """[S-1-P, H], positions P..S-2, before the final norm."""
    target_argmax: Tensor
    """int64 [S-1-P]: the target's own choice at those positions, over its full vocabulary."""

    def check(self, manifest: StoreManifest) -> None:
        """Refuses shapes, ids or values that training could not use.

        Raises:
            DataError: naming the sample, the field and what was expected.
        """
        length, prompt = len(self.token_ids), self.num_prompt_tokens
        if not 1 <= prompt < length:
            raise DataError(f"sample {self.id}: {prompt} prompt tokens of {length} in all; both parts must be there")
        aux_width = len(manifest.aux_layer_ids) * manifest.hidden_size
        shapes = {
            "aux_hidden_states": (length - 1, aux_width),
            "final_hidden_states": (length - 1 - prompt, manifest.hidden_size),
            "target_argmax": (length - 1 - prompt,),
        }
        for name, shape in shapes.items():
            if tuple(getattr(self, name).shape) != shape:
                came = tuple(getattr(self, name).shape)
                raise DataError(f"sample {self.id}: {name} has shape {came}, {length} tokens need {shape}")
        for name in ("token_ids", "target_argmax"):
            ids = getattr(self, name)
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < manifest.vocab_size):
                raise DataError(f"sample {self.id}: {name} leaves the target's vocabulary of {manifest.vocab_size}")
        for name in ("aux_hidden_states", "final_hidden_states"):
            states = getattr(self, name)
            if states.dtype != _DTYPES[manifest.dtype]:
                raise DataError(f"sample {self.id}: {name} is {states.dtype}, the store holds {manifest.dtype}")
            if not bool(torch.isfinite(states).all()):
                raise DataError(f"sample {self.id}: {name} holds NaN or infinite values")


def update_manifest(path: Path, **changes: Any) -> StoreManifest:
    """Replaces fields of `store.json` that may change: `contract` and `dataset_fingerprint`."""
    if set(changes) - _MAY_CHANGE:
        raise ValueError(f"only {sorted(_MAY_CHANGE)} of a store may change, not {sorted(set(changes) - _MAY_CHANGE)}")
    manifest = replace(StoreManifest.load(path), **changes)
    manifest.save(path)
    return manifest
