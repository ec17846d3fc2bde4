"""What a killed run left in its store: a finished shard gets the index it lacks, the rest goes."""

from __future__ import annotations

import logging
from pathlib import Path

from eagle3_kimi.hidden_states.growing_shard import read_entries
from eagle3_kimi.hidden_states.manifest import MANIFEST_NAME, StoreManifest
from eagle3_kimi.hidden_states.shards import index_shard, read_token_digests
from eagle3_kimi.hidden_states.store_check import find_fault

logger = logging.getLogger(__name__)


def recover_store(path: Path) -> None:
    """Tidies the folder of a store up. One process does it, while none writes there.

    A writer's shard has its name once the disk has all of it, and its index after its digest was computed; killed in
    between, it is complete and only its index is missing. It is checked like any other before it gets one.

    Args:
        path: the folder; there may be no store.

    Raises:
        DataError: a damaged index.
    """
    if not (path / MANIFEST_NAME).exists():
        return
    for file in path.glob(".*.tmp"):
        file.unlink()
    unindexed = [file for file in path.glob("features-r*.safetensors") if not file.with_suffix(".json").exists()]
    if not unindexed:
        return
    manifest, known = StoreManifest.load(path), set(read_token_digests(path))
    for shard in sorted(unindexed):
        entries = read_entries(shard)
        if entries is None or not known.isdisjoint(entry["id"] for entry in entries):
            continue
        fault = find_fault(shard, entries, manifest)
        if fault is not None:
            logger.warning("the shard %s has no index and %s: its samples are extracted again", shard, fault)
            continue
        index_shard(shard, entries)
        known.update(entry["id"] for entry in entries)
