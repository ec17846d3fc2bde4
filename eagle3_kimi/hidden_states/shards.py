"""Files of a feature store: indexes, digests, and writing that survives a crash."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError

_INDEX_KEYS = {"shard", "sha256", "bytes", "samples"}


def index_files(path: Path) -> list[Path]:
    """Indexes of the finished shards in the folder `path`."""
    return sorted(path.glob("features-r*.json"))


def load_index(file: Path) -> dict[str, Any]:
    """A shard's index; raises `DataError` when it is damaged."""
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(index, dict) or not _INDEX_KEYS <= index.keys():
            raise ValueError(f"it should have {sorted(_INDEX_KEYS)}")
    except ValueError as error:
        raise DataError(
            f"the index {file} is damaged ({error}); delete it and its shard, then extract again"
        ) from error
    return index


def index_shard(shard: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Writes the index of a finished shard; `entries` are its samples'."""
    size, digest = shard.stat().st_size, file_digest(shard)
    index = {"shard": shard.name, "sha256": digest, "bytes": size, "samples": list(entries)}
    write_json(shard.with_suffix(".json"), index)


def file_digest(file: Path) -> str:
    """SHA-256 of a file, the digest the Hub knows large files by."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes under a temporary name, syncs, renames, and syncs the folder."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as handle:
            json.dump(value, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(file.parent, os.O_RDONLY)  # the renames themselves, of shard and index
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def token_digest(token_ids: Tensor) -> str:
    """Short digest of a sample's token ids: tells a regenerated sample from the one in the store."""
    return hashlib.sha256(token_ids.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()[:16]


def samples_fingerprint(samples: Iterable[tuple[str, str, str]]) -> str:
    """Digest of samples given as id, split and `token_digest`, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(samples)).encode()).hexdigest()


def read_token_digests(path: Path) -> dict[str, str]:
    """Sample id -> `token_digest`, over the finished shards of the folder `path`; empty where there is no store."""
    if not path.is_dir():
        return {}
    return {entry["id"]: entry["tokens"] for file in index_files(path) for entry in load_index(file)["samples"]}
