"""Verifying a feature store: checksums, and every sample against its index and the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.feature_sample import FeatureSample, tensor_layout
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.shards import file_digest, index_files, load_index


@dataclass(frozen=True, kw_only=True)
class StoreCheck:
    """What `check_store` found."""

    shards: int
    samples: int
    """Good ones."""
    tokens: int
    """Of the good samples."""
    bytes: int
    damaged: dict[str, str]
    """Shard -> what is wrong with it."""
    lost_ids: tuple[str, ...]
    """Samples of damaged shards: extract them again after deleting those shards and their indexes."""
    leftovers: tuple[str, ...]
    """Files of interrupted writes; they may be deleted."""
    contract_fault: str
    """Why training refuses the store; empty where its contract check passed."""

    @property
    def ok(self) -> bool:
        return not self.damaged and not self.contract_fault


def check_store(path: Path) -> StoreCheck:
    """Reads every shard: checksum, tensors, values, ids.

    Raises:
        DataError: `path` is not a feature store.
    """
    manifest = StoreManifest.load(path)
    damaged: dict[str, str] = {}
    lost: list[str] = []
    seen: set[str] = set()
    known, tokens, size = set(), 0, 0
    for file in index_files(path):
        shard = file.with_suffix(".safetensors")
        known.add(shard.name)
        try:
            index = load_index(file)
            ids = [entry["id"] for entry in index["samples"]]
        except DataError as error:
            damaged[shard.name], index, ids = str(error), {}, _read_ids(shard)
        fault = damaged.get(shard.name) or _find_shard_fault(shard, index, manifest)
        twice = seen.intersection(ids)
        if not fault and twice:
            fault = f"holds {len(twice)} samples that another shard holds too, e.g. {sorted(twice)[0]}"
        if fault:
            damaged[shard.name] = fault
            lost += [sample for sample in ids if sample not in twice]
            continue
        seen.update(ids)
        tokens += sum(entry["num_tokens"] for entry in index["samples"])
        size += index["bytes"]
    leftovers = [
        f.name for f in path.iterdir() if f.suffix == ".tmp" or (f.suffix == ".safetensors" and f.name not in known)
    ]
    return StoreCheck(
        shards=len(known), samples=len(seen), tokens=tokens, bytes=size,
        damaged=damaged, lost_ids=tuple(lost), leftovers=tuple(sorted(leftovers)),
        contract_fault=_find_contract_fault(manifest),
    )  # fmt: skip


def _find_shard_fault(shard: Path, index: dict[str, Any], manifest: StoreManifest) -> str | None:
    if not shard.is_file():
        return "is missing"
    if shard.stat().st_size != index["bytes"]:
        return f"has {shard.stat().st_size} bytes, the index says {index['bytes']}"
    if file_digest(shard) != index["sha256"]:
        return "does not have the checksum in its index"
    return find_fault(shard, index["samples"], manifest)


def find_fault(shard: Path, entries: Sequence[Mapping[str, Any]], manifest: StoreManifest) -> str | None:
    """What is wrong with the samples in a shard; `entries` are their index entries."""
    try:
        with safe_open(shard, framework="pt") as handle:
            for entry in entries:
                layout = tensor_layout(manifest, entry["num_tokens"], entry["num_prompt_tokens"])
                tensors = {name: handle.get_tensor(f"{entry['id']}/{name}") for name in layout}
                sample = FeatureSample.from_tensors(entry, tensors)
                sample.check(manifest)
                if sample.index_entry() != entry:
                    return f"holds something else of {sample.id} than is written of it"
    except (SafetensorError, DataError) as error:
        return f"does not hold what is written of it: {error}"
    return None


def _read_ids(shard: Path) -> list[str]:
    """Ids of the samples in a shard whose index is damaged, as far as its header can be read."""
    try:
        with safe_open(shard, framework="pt") as handle:
            return sorted(_ids_of(handle.keys()))
    except (SafetensorError, OSError):
        return []


def _ids_of(names: list[str]) -> Iterator[str]:
    return (name.removesuffix("/token_ids") for name in names if name.endswith("/token_ids"))


def _find_contract_fault(manifest: StoreManifest) -> str:
    if manifest.contract is None:
        return "its contract check has not run"
    return "" if manifest.contract["passed"] else f"its contract check failed: {manifest.contract.get('fault', '')}"
