"""Feature stores with one sample a shard."""

from __future__ import annotations

from pathlib import Path

from eagle3_kimi.hidden_states.store import FeatureFormat, FeatureStoreWriter, StoreManifest
from tests.training.toy import AUX, HIDDEN, LAYERS, VOCAB, ToyTarget


def write_store(path: Path, *, shards: int = 3, target: str = "toy") -> Path:
    """Makes a store, or adds shards to one."""
    toy = ToyTarget()
    manifest = StoreManifest(
        target=target, target_revision="0f" * 20, hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCAB,
        aux_layer_ids=AUX, dtype="float32", format=FeatureFormat(aux_dtype="fp32", targets="state"), dataset_fingerprint="data", protocol="toy",
        contract={"passed": True, "agreement": 0.99, "fault": ""},
    )  # fmt: skip
    with FeatureStoreWriter(path, manifest, max_shard_bytes=1) as writer:
        for index in range(len(writer.written_ids), shards):
            writer.add(toy.sample(index, prompt=3, output=5))
    return path
