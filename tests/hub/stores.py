"""Feature stores with one sample a shard."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from eagle3_kimi.hidden_states.store import FeatureStoreWriter, StoreManifest
from eagle3_kimi.hub.features import list_shards
from tests.training.toy import ToyTarget, write_toy_run

REVISION = "0f" * 20


def write_store(path: Path, *, shards: int = 3, target: str = "toy") -> Path:
    """Makes a store, or adds shards to one."""
    toy = ToyTarget()
    with tempfile.TemporaryDirectory() as folder:
        _, toy_store = write_toy_run(Path(folder), samples=1)
        contract = {"passed": True, "agreement": 0.99, "fault": ""}
        manifest = replace(
            StoreManifest.load(toy_store), target=target, target_revision=REVISION, contract=contract
        )  # fmt: skip
    with FeatureStoreWriter(path, manifest, max_shard_bytes=1) as writer:
        for index in range(len(list_shards(path)), shards):
            writer.add(toy.sample(index, prompt=3, output=5))
    return path
