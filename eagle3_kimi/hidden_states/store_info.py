"""What a feature store holds, read from its manifest and indexes alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.shards import index_files, load_index


def describe_store(path: Path) -> dict[str, str]:
    """Name -> text, in the order in which a person wants to read it.

    Raises:
        DataError: `path` is not a feature store, or an index is damaged.
    """
    manifest = StoreManifest.load(path)
    indexes = [load_index(file) for file in index_files(path)]
    entries = [entry for index in indexes for entry in index["samples"]]
    splits = Counter(entry["split"] for entry in entries)
    tokens = sum(entry["num_tokens"] for entry in entries)
    prompt = sum(entry["num_prompt_tokens"] for entry in entries)
    size = sum(index["bytes"] for index in indexes)
    contract = "not checked yet"
    if manifest.contract is not None:
        agreement = f"agreement {manifest.contract['agreement']:.1%}"
        contract = f"passed, {agreement}" if manifest.contract["passed"] else f"FAILED: {manifest.contract['fault']}"
    return {
        "target": manifest.target,
        "revision": manifest.target_revision,
        "aux layer ids": " ".join(map(str, manifest.aux_layer_ids)),
        "ran in": manifest.dtype,
        "format": str(manifest.format),
        "contract": contract,
        "samples": ", ".join(f"{count} {split}" for split, count in sorted(splits.items())) or "none",
        "tokens": f"{tokens}, {prompt} of them prompt",
        "shards": str(len(indexes)),
        "bytes": f"{size} ({size / tokens:.0f} a token)" if tokens else str(size),
    }
