"""Verifying a feature store: checksums, sizes, ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.shards import file_digest, index_files, load_index


@dataclass(frozen=True, kw_only=True)
class StoreCheck:
    """What `check_store` found."""

    shards: int
    samples: int
    tokens: int
    bytes: int
    damaged: dict[str, str]
    """Shard -> what is wrong with it."""
    lost_ids: tuple[str, ...]
    """Samples of damaged shards: extract them again after deleting those shards and their indexes."""
    leftovers: tuple[str, ...]
    """Files of interrupted writes; they may be deleted."""

    @property
    def ok(self) -> bool:
        return not self.damaged


def check_store(path: Path) -> StoreCheck:
    """Reads every shard and compares checksums, tensors and indexes.

    Raises:
        DataError: `path` is not a feature store.
    """
    StoreManifest.load(path)
    damaged: dict[str, str] = {}
    lost: list[str] = []
    seen: set[str] = set()
    known, samples, tokens, size = set(), 0, 0, 0
    for file in index_files(path):
        index = load_index(file)
        known.add(index["shard"])
        fault = _find_fault(path / index["shard"], index)
        twice = seen & {entry["id"] for entry in index["samples"]}
        if twice:
            fault = f"holds {len(twice)} samples that another shard holds too, e.g. {sorted(twice)[0]}"
        if fault:
            damaged[index["shard"]] = fault
            lost += [entry["id"] for entry in index["samples"] if entry["id"] not in twice]
            continue
        seen.update(entry["id"] for entry in index["samples"])
        samples += len(index["samples"])
        tokens += sum(entry["num_tokens"] for entry in index["samples"])
        size += index["bytes"]
    leftovers = [
        f.name for f in path.iterdir() if f.suffix == ".tmp" or (f.suffix == ".safetensors" and f.name not in known)
    ]
    return StoreCheck(
        shards=len(known), samples=samples, tokens=tokens, bytes=size,
        damaged=damaged, lost_ids=tuple(lost), leftovers=tuple(sorted(leftovers)),
    )  # fmt: skip


def _find_fault(shard: Path, index: dict[str, Any]) -> str | None:
    if not shard.is_file():
        return "is missing"
    if shard.stat().st_size != index["bytes"]:
        return f"has {shard.stat().st_size} bytes, the index says {index['bytes']}"
    if file_digest(shard) != index["sha256"]:
        return "does not have the checksum in its index"
    return None
