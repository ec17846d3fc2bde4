"""Runs the target over a data set and fills a feature store; one call a launched process.

    data set ──► shares ──► source (vLLM | transformers) ──► contract check ──► shards
                 by group   boundary 1, aux ids, n           first samples,     one writer a group
                                                             then a trickle

Prefill only, token-exact: prompt ids + output ids, without the last one, which is never an input.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from eagle3_kimi.errors import DataError, RunStopped
from eagle3_kimi.hidden_states.admission import find_unfit
from eagle3_kimi.hidden_states.capture import StateSource, TransformersSource, VllmSource
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.contract import ANCHOR_LAYER_ID
from eagle3_kimi.hidden_states.disk import check_free_space
from eagle3_kimi.hidden_states.formats import bytes_per_token
from eagle3_kimi.hidden_states.manifest import StoreManifest, check_may_be_added_to, update_manifest
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import SampleReader, SampleRef, plan_shares
from eagle3_kimi.hidden_states.shards import read_token_digests
from eagle3_kimi.hidden_states.share import ShareRun
from eagle3_kimi.target import Target, detect_preset, resolve_target

logger = logging.getLogger(__name__)


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
    reader = SampleReader(config.dataset)
    manifest = build_manifest(config, target, reader)
    unfit = find_unfit(reader, target, accept_revisions=config.accept_revisions)
    refuse_unfit(unfit, len(reader.refs), config.max_refused)
    remaining = [ref for ref in find_remaining(config.output, manifest, reader.refs) if ref.id not in unfit]
    check_free_space(config.output, count_bytes(remaining, target, manifest))
    ranks.gather(None)  # everyone has looked before anyone writes
    skipped = len(reader.refs) - len(unfit) - len(remaining)
    if skipped and ranks.rank == 0:
        logger.info("%d of %d samples are in %s already", skipped, len(reader.refs), config.output)
    written = tokens = refused = 0
    if remaining:
        share = plan_shares(remaining, ranks.num_groups, window=config.window)[ranks.group]
        source = open_source(config, target, manifest, ranks, longest=max(ref.num_tokens for ref in remaining))
        with closing(ShareRun(config, target, reader, manifest, ranks, source)) as run:
            run.extract(share)
            counts = [counts for counts in ranks.gather(run.counts if ranks.is_leader else None) if counts is not None]
        written, tokens, refused = (sum(column) for column in zip(*counts, strict=True))
    refused += len(unfit)
    if ranks.rank == 0 and (written or skipped):
        update_manifest(config.output, dataset_fingerprint=manifest.dataset_fingerprint)
        logger.info("%s: %d samples (%d tokens) written, %d refused", config.output, written, tokens, refused)
    return ExtractSummary(samples=written, tokens=tokens, skipped=skipped, refused=refused)


def count_bytes(refs: Sequence[SampleRef], target: Target, manifest: StoreManifest) -> int:
    """Bytes that the samples' rows will take in the store."""
    tokens = sum(ref.num_tokens for ref in refs)
    supervised = tokens - sum(ref.num_prompt_tokens for ref in refs)
    layers = len(manifest.aux_layer_ids)
    per_token = bytes_per_token(target.config, manifest.format, supervised / max(tokens, 1), num_aux_layers=layers)
    return round(tokens * per_token)


def refuse_unfit(unfit: dict[str, str], asked: int, max_refused: float) -> None:
    """Names the samples that the target cannot take.

    Raises:
        RunStopped: they are a larger share of the `asked` ones than `max_refused`.
    """
    for sample, fault in unfit.items():
        logger.warning("refused: sample %s: %s", sample, fault)
    if len(unfit) > max_refused * asked:
        sample, fault = next(iter(unfit.items()))
        raise RunStopped(
            f"{len(unfit)} of {asked} samples were refused, a larger share than max_refused {max_refused:g}; e.g. "
            f"sample {sample}: {fault}. Nothing of this run was extracted"
        )


def open_source(
    config: ExtractConfig, target: Target, manifest: StoreManifest, ranks: Ranks, *, longest: int
) -> StateSource:
    """The engine, capturing boundary 1 and the last one beside the aux layers. `longest`: tokens of a sample."""
    layer_ids = tuple(sorted({ANCHOR_LAYER_ID, *manifest.aux_layer_ids, target.num_layers}))
    if config.engine == "transformers":
        return TransformersSource(
            target,
            layer_ids,
            dtype=manifest.dtype,
            device=ranks.device,
            max_batched_tokens=config.max_batched_tokens,
        )
    return VllmSource(
        target,
        layer_ids,
        dtype=manifest.dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        external_launcher=ranks.world_size > 1,
        max_model_len=longest,
        max_batched_tokens=config.max_batched_tokens,
        max_tokens_in_flight=config.max_tokens_in_flight,
        engine_args=config.engine_args,
    )


def build_manifest(config: ExtractConfig, target: Target, reader: SampleReader) -> StoreManifest:
    """The manifest of the store that this run makes or continues."""
    protocol = config.protocol or reader.provenance("protocol")
    if protocol is None:
        protocol = detect_preset(target.load_tokenizer(), target.config)
    return StoreManifest.describe(
        target,
        dtype=config.dtype,
        aux_layer_ids=config.aux_layer_ids,
        format=config.format,
        dataset_fingerprint=reader.fingerprint,
        protocol=protocol,
    )


def find_remaining(path: Path, manifest: StoreManifest, refs: list[SampleRef]) -> list[SampleRef]:
    """Samples that the store at `path` does not hold.

    Raises:
        DataError: the store belongs to another target, or holds a sample of the data set with other tokens.
    """
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
    return [ref for ref in refs if ref.id not in digests]
