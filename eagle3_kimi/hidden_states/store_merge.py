"""Joining feature stores: the same shards under one roof."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.shards import index_files, load_index, samples_fingerprint, write_json
from eagle3_kimi.hidden_states.store import FeatureStore


def merge_stores(paths: Sequence[Path], output: Path) -> FeatureStore:
    """Makes a store of all samples of the stores `paths`, which stay as they are.

    Shards are hard links where the file system can (they are never written to again), else copies. The manifest comes
    last, so an interrupted merge leaves no store.

    Raises:
        UsageError: fewer than two stores, or `output` is not empty.
        DataError: the stores differ in target, revision, layers, dtype or format, share a sample, or one of them is
            incomplete or without a passed contract.
    """
    if len(paths) < 2:
        raise UsageError(f"merging wants at least two stores, {len(paths)} came")
    if output.exists() and any(output.iterdir()):
        raise UsageError(f"{output} is not empty; give the merged store a folder of its own")
    manifests = [_load_proven(path) for path in paths]
    for path, manifest in zip(paths[1:], manifests[1:], strict=True):
        manifests[0].check_same_store(manifest, paths[0], added=path)
    shards = [(path, load_index(file)) for path in paths for file in index_files(path)]
    _check_shards(shards)
    output.mkdir(parents=True, exist_ok=True)
    for number, (path, index) in enumerate(shards):
        stem = f"features-r00-{number:05d}"
        _link(path / index["shard"], output / f"{stem}.safetensors")
        write_json(output / f"{stem}.json", {**index, "shard": f"{stem}.safetensors"})
    samples = ((entry["id"], entry["split"], entry["tokens"]) for _, index in shards for entry in index["samples"])
    worst = min((manifest.contract or {} for manifest in manifests), key=lambda contract: contract["agreement"])
    replace(manifests[0], contract=worst, dataset_fingerprint=samples_fingerprint(samples)).save(output)
    return FeatureStore(output)


def _load_proven(path: Path) -> StoreManifest:
    manifest = StoreManifest.load(path)
    if not (manifest.contract or {}).get("passed"):
        raise DataError(f"the store {path} has no passed contract check; it would spoil the merged one")
    return manifest


def _check_shards(shards: Sequence[tuple[Path, dict[str, Any]]]) -> None:
    owner: dict[str, Path] = {}
    for path, index in shards:
        file = path / index["shard"]
        if not file.is_file() or file.stat().st_size != index["bytes"]:
            raise DataError(f"the shard {file} is missing or torn; `eagle3-kimi store check {path}` says what to do")
        for entry in index["samples"]:
            if entry["id"] in owner:
                raise DataError(f"the sample {entry['id']} is in {owner[entry['id']]} and in {path}")
            owner[entry["id"]] = path


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source.resolve(), destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, destination)
        with destination.open("rb") as handle:
            os.fsync(handle.fileno())
