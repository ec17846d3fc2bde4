"""The feature store: safetensors shards with an index each, read through the memory map.

    store.json                          what every shard has in common (`StoreManifest`)
    features-r00-00000.safetensors      {id}/token_ids, {id}/aux_codes, ...: see `FeatureFormat`
    features-r00-00000.json             the index: sha256 of the shard, and one entry a sample

Everything is written under a temporary name, synced and renamed; the index comes last, so a shard
without its index does not exist, and gets one from its own header when a killed run goes on. A sample
of S tokens with P prompt tokens keeps the aux states of positions 0..S-2 (the last token is never an
input) and what the target says of the next token at the supervised positions:

    position     0    1   ...  P-1    P   ...  S-2   S-1
    aux          x    x   ...   x     x   ...   x     -
    target       -    -   ...   -     x   ...   x     -
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.feature_sample import FeatureSample, tensor_layout
from eagle3_kimi.hidden_states.formats import FeatureFormat
from eagle3_kimi.hidden_states.manifest import STORE_SCHEMA_VERSION, StoreManifest
from eagle3_kimi.hidden_states.shards import index_files, load_index
from eagle3_kimi.hidden_states.store_check import StoreCheck, check_store
from eagle3_kimi.hidden_states.writer import FeatureStoreWriter

__all__ = [
    "STORE_SCHEMA_VERSION",
    "FeatureFormat",
    "FeatureSample",
    "FeatureStore",
    "FeatureStoreWriter",
    "StoreCheck",
    "StoreManifest",
    "check_store",
]


_MAPPED_BYTES = 128 << 20
"""Bytes read through the memory maps before they are closed and opened again. A page that was read stays in the
process's resident memory as long as its map is open: without this, that of a trainer would grow to the store's size."""


class FeatureStore:
    """Random access to a store's samples, sorted by id: the order does not depend on who wrote them.

    Args:
        path: the store's folder.
        split: `train` or `validation`; None takes all.

    Raises:
        DataError: not a store, a shard is missing, or an id occurs twice.
    """

    def __init__(self, path: Path, *, split: str | None = None) -> None:
        self.path = Path(path)
        self.manifest = StoreManifest.load(self.path)
        self._entries: list[tuple[str, dict[str, Any]]] = []
        checksums = []
        for file in index_files(self.path):
            index = load_index(file)
            if not (self.path / index["shard"]).is_file():
                raise DataError(f"{file} names the shard {index['shard']}, which is not there; run the store's check")
            checksums.append(index["sha256"])
            self._entries += [(index["shard"], e) for e in index["samples"] if split in (None, e["split"])]
        self._entries.sort(key=lambda item: item[1]["id"])
        self.ids: list[str] = [entry["id"] for _, entry in self._entries]
        self.lengths: list[int] = [entry["num_tokens"] for _, entry in self._entries]
        self.prompt_lengths: list[int] = [entry["num_prompt_tokens"] for _, entry in self._entries]
        twice = [a for a, b in zip(self.ids, self.ids[1:], strict=False) if a == b]
        if twice:
            raise DataError(f"{self.path} holds the sample {twice[0]} twice (and {len(twice) - 1} more)")
        self._checksums = sorted(checksums)
        self._shards: dict[str, Any] = {}
        self._bytes_read = 0

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the ids and of the shards' checksums."""
        return hashlib.sha256(json.dumps([self.ids, self._checksums]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, i: int) -> FeatureSample:
        shard, entry = self._entries[i]
        if self._bytes_read > _MAPPED_BYTES:
            self._shards, self._bytes_read = {}, 0
        if shard not in self._shards:
            self._shards[shard] = safe_open(self.path / shard, framework="pt")
        layout = tensor_layout(self.manifest, entry["num_tokens"], entry["num_prompt_tokens"])
        tensors = {name: self._shards[shard].get_tensor(f"{entry['id']}/{name}") for name in layout}
        self._bytes_read += sum(tensor.nbytes for tensor in tensors.values())
        return FeatureSample.from_tensors(entry, tensors)

    def __iter__(self) -> Iterator[FeatureSample]:
        return (self[i] for i in range(len(self)))

    def close(self) -> None:
        """Closes the memory maps: the disk gives a deleted shard's room back when nobody has it open."""
        self._shards.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}  # memory maps are opened again in the other process
