"""What all samples of a feature store have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from eagle3_kimi.drafter.config import check_aux_layer_ids, default_aux_layer_ids
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.hidden_states.formats import FeatureFormat
from eagle3_kimi.hidden_states.shards import write_json
from eagle3_kimi.target import Target

STORE_SCHEMA_VERSION = 2
MANIFEST_NAME = "store.json"
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
    """`float32` or `bfloat16`, in which the target ran."""
    format: FeatureFormat
    """How the shards hold what it gave."""
    final_pre_norm: bool = True
    """True: the final state is the last layer's output before the final norm."""
    dataset_fingerprint: str
    """Digest of ids and token ids of the data set the states belong to."""
    protocol: str
    """Name of the protocol preset that read the spans."""
    contract: dict[str, Any] | None = None
    """`{"passed": bool, "agreement": float, ...}` once the contract check ran."""

    @classmethod
    def describe(
        cls, target: Target, *, dtype: str, aux_layer_ids: Sequence[int] | None, format: FeatureFormat, **more: Any
    ) -> StoreManifest:
        """The manifest of a store of `target`.

        Args:
            target: the target model.
            dtype: `float32`, `bfloat16`, or `auto` (the checkpoint's).
            aux_layer_ids: boundary numbering, low to high; None takes (2, n // 2, n - 3).
            format: of the shards.
            more: the other fields.

        Raises:
            UsageError: a dtype or layer ids that cannot be captured.
        """
        if dtype == "auto":
            dtype = str(target.config.get("dtype") or target.config.get("torch_dtype") or "bfloat16")
        if dtype not in ("float32", "bfloat16"):
            raise UsageError(f"dtype must be float32 or bfloat16, not {dtype} (float16 overflows on large activations)")
        ids = tuple(aux_layer_ids or default_aux_layer_ids(target.num_layers))
        check_aux_layer_ids(ids, target.num_layers)
        if ids[0] == 0:
            raise UsageError("aux layer id 0 is the embedding, which engines cannot capture; the lowest id is 1")
        return cls(
            target=target.name,
            target_revision=target.revision,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
            aux_layer_ids=ids,
            dtype=dtype,
            format=format,
            **more,
        )

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
        layer_ids, stored = tuple(values["aux_layer_ids"]), FeatureFormat(**values["format"])
        return cls(**{**values, "aux_layer_ids": layer_ids, "format": stored})

    def check_same_store(self, other: StoreManifest, path: Path, *, added: Path | None = None) -> None:
        """Refuses to mix what belongs to another target, revision, layer ids, dtype or format.

        Args:
            other: what is to be added.
            path: the store of this manifest, to name it.
            added: the store of the other one, if it has any.

        Raises:
            DataError: naming everything that differs.
        """
        differing = [
            f"{item.name} {getattr(self, item.name)} against {getattr(other, item.name)}"
            for item in fields(self)
            if item.name not in _MAY_CHANGE and getattr(self, item.name) != getattr(other, item.name)
        ]
        if differing:
            raise DataError(
                f"the store {path} differs from {added or 'what this run would add to it'}: {'; '.join(differing)}. "
                "A mixed store is never made: choose another output folder"
            )


def check_may_be_added_to(path: Path, manifest: StoreManifest) -> None:
    """Raises unless samples of `manifest` may be added to the store at `path`.

    Raises:
        DataError: it belongs to something else, or failed its contract check.
    """
    stored = StoreManifest.load(path)
    stored.check_same_store(manifest, path)
    if stored.contract is not None and not stored.contract["passed"]:
        raise DataError(
            f"the store {path} failed its contract check ({stored.contract['fault']}); nothing is added to it: choose "
            "another folder"
        )


def update_manifest(path: Path, **changes: Any) -> StoreManifest:
    """Replaces fields of `store.json` that may change: `contract` and `dataset_fingerprint`."""
    if set(changes) - _MAY_CHANGE:
        raise ValueError(f"only {sorted(_MAY_CHANGE)} of a store may change, not {sorted(set(changes) - _MAY_CHANGE)}")
    manifest = replace(StoreManifest.load(path), **changes)
    manifest.save(path)
    return manifest
