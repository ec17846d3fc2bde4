"""Runs the target over a data set and fills a feature store; one call a launched process.

    data set ──► shares ──► source (vLLM | transformers) ──► contract check ──► shards
                 by group   boundary 1, aux ids, n           first samples,     one writer a group
                                                             then a trickle

Prefill only, token-exact: prompt ids + output ids, without the last one, which is never an input.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.disk import check_free_space
from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.feature_sample import tensor_layout
from eagle3_kimi.hidden_states.manifest import StoreManifest, check_may_be_added_to, update_manifest
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.recovery import recover_store
from eagle3_kimi.hidden_states.samples import SampleRef
from eagle3_kimi.hidden_states.shards import read_token_digests
from eagle3_kimi.target import resolve_target

logger = logging.getLogger(__name__)

_NAME_BYTES = 200
"""Beside a sample's id: what a shard's header and its index say of one tensor."""


@dataclass(frozen=True, kw_only=True)
class ExtractSummary:
    """What one run did, over all its processes."""

    samples: int
    """Samples written by this run."""
    tokens: int
    skipped: int
    """Samples that were in the store already."""
    refused: int
    """Samples the target cannot take, or whose states were bad."""


def extract_hidden_states(config: ExtractConfig) -> ExtractSummary:
    """Extracts what the store does not hold yet. Called by every launched process.

    Raises:
        UsageError: a wrong option, a number of processes that does not fit, or too small a disk.
        DataError: a store of another target, or states that fail the contract.
        RunStopped: too many samples were refused, a later sample failed the contract, or the disk is full; what is
            indexed stays.
    """
    ranks = Ranks.join(config.tensor_parallel_size)
    target = resolve_target(config.target, revision=config.revision, trust_remote_code=config.trust_remote_code)
    extraction = Extraction(config, config.dataset, target, ranks)
    refs = extraction.reader.refs
    remaining = find_remaining(config.output, extraction.manifest, refs, ranks, without=extraction.unfit)
    check_free_space(config.output, count_bytes(remaining, extraction.manifest))
    skipped = len(extraction.refs) - len(remaining)
    if skipped and ranks.rank == 0:
        logger.info("%d of %d samples are in %s already", skipped, len(refs), config.output)
    with closing(extraction):
        written, tokens, refused = extraction.write(remaining, config.output)
    refused += len(extraction.unfit)
    if ranks.rank == 0 and (written or skipped):
        update_manifest(config.output, dataset_fingerprint=extraction.manifest.dataset_fingerprint)
        logger.info("%s: %d samples (%d tokens) written, %d refused", config.output, written, tokens, refused)
    return ExtractSummary(samples=written, tokens=tokens, skipped=skipped, refused=refused)


def count_bytes(refs: Iterable[SampleRef], manifest: StoreManifest) -> int:
    """Bytes that the samples will take in a store, names and index included."""
    total = 0
    for ref in refs:
        layout = tensor_layout(manifest, ref.num_tokens, ref.num_prompt_tokens)
        total += sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
        total += (len(ref.id) + _NAME_BYTES) * (len(layout) + 1)
    return total


def find_remaining(
    path: Path, manifest: StoreManifest, refs: Sequence[SampleRef], ranks: Ranks, *, without: Container[str] = ()
) -> list[SampleRef]:
    """Samples that the store at `path` does not hold, `without` some. Every rank asks, before anyone writes.

    Raises:
        DataError: the store belongs to another target, or holds a sample of the data set with other tokens.
    """
    if ranks.rank == 0:
        recover_store(path)
    ranks.gather(None)
    digests = read_token_digests(path)
    if digests:
        check_may_be_added_to(path, manifest)
    known = {ref.id: ref.digest for ref in refs}
    foreign = [sample for sample, digest in digests.items() if known.get(sample) != digest]
    if foreign:
        raise DataError(
            f"the store {path} holds {len(foreign)} samples that the data set does not hold with these tokens, e.g. "
            f"{foreign[0]}; it was made from another data set: choose another output folder"
        )
    return [ref for ref in refs if ref.id not in digests and ref.id not in without]
