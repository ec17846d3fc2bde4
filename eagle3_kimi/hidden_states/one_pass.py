"""Fills a feature store while its samples are generated: what happens with a finished sample's states.

    engine ──► complete? ──► journaled ──► contract ──► encoded ──► shard
               else nothing  the sample    first ones,              its index comes last
               is kept                     then a trickle

A crash leaves this true: **the store never holds a sample that the journal lacks, and a journaled sample without an
indexed shard counts as unfinished.** A sample is journaled before its features are given to the writer, and no answer
is lost or generated twice: the next run finds the journaled samples that the store lacks, sends their ids through the
same engine as a prefill, and is not done before both hold the same. So a run with capture also completes a journal
that was written without, and the store may be deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.hidden_states.contract import ANCHOR_LAYER_ID, ContractCheck
from eagle3_kimi.hidden_states.encode import Captured, Encoded, FeatureEncoder
from eagle3_kimi.hidden_states.encoder_thread import EncoderThread
from eagle3_kimi.hidden_states.manifest import MANIFEST_NAME, StoreManifest, check_may_be_added_to, update_manifest
from eagle3_kimi.hidden_states.recovery import recover_store
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.hidden_states.shards import index_files, load_index, samples_fingerprint, token_digest
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.trickle import check_one_more
from eagle3_kimi.hidden_states.writer import FeatureStoreWriter
from eagle3_kimi.protocol import Span, SpanKind
from eagle3_kimi.target import Target

logger = logging.getLogger(__name__)

_MOST_TOKENS = 8192
"""Whose states may wait to be encoded."""


class OnePassStore:
    """The store of one generation run. Use as a context manager: an end without an error is checked and recorded.

    Args:
        config: which states, where.
        target: the target model.
        dtype: of the target as it runs: `bfloat16`, `float32`, or `auto` (the checkpoint's).
        temperature: the sampling temperature.
        protocol: name of the preset that reads the spans.
        tensor_parallel_size: processes that share the target's layers.

    Raises:
        UsageError: a dtype or layer ids that cannot be captured.
        DataError: the folder holds a store of something else, or one that failed its contract check.
    """

    def __init__(
        self,
        config: CaptureConfig,
        target: Target,
        *,
        dtype: str,
        temperature: float,
        protocol: str,
        tensor_parallel_size: int = 1,
    ) -> None:
        self._config, self._target = config, target
        self._temperature, self._tensor_parallel_size = temperature, tensor_parallel_size
        self._manifest = StoreManifest.describe(
            target,
            dtype=dtype,
            aux_layer_ids=config.aux_layer_ids,
            format=config.format,
            dataset_fingerprint="",  # it follows at the end
            protocol=protocol,
        )
        self._stored = _read_stored(config.store, self._manifest)
        self.layer_ids = tuple(sorted({ANCHOR_LAYER_ID, *self._manifest.aux_layer_ids, target.num_layers}))
        """Boundaries that the engine must capture."""
        self._seen: dict[str, tuple[str, str]] = {}  # id -> split, digest of every sample of this run
        self._unchecked: list[Captured] | None = []  # None once the contract has passed
        self._written = 0
        self._encoder: FeatureEncoder
        self._contract: ContractCheck
        self._open = ExitStack()
        self._thread: EncoderThread
        self._writer: FeatureStoreWriter

    def holds(self, sample: Sample) -> bool:
        """Whether an indexed shard has the journaled sample. Call it for each one.

        Raises:
            DataError: it has other tokens there, or another split.
        """
        entry = sample.split, token_digest(sample.token_ids)
        self._seen[sample.id] = entry
        stored = self._stored.get(sample.id)
        if stored not in (None, entry):
            raise DataError(
                f"the store {self._config.store} holds the sample {sample.id} with other tokens or in another split; "
                "it was made by another run: choose another folder"
            )
        return stored is not None

    def add(self, sample: Sample, states: CapturedStates) -> None:
        """Takes a sample whose states are fit for it (`encode.find_fault`), once it is journaled.

        Raises:
            DataError: the first samples fail the contract; nothing has been written.
            RunStopped: an earlier one does, or the disk is full; what is indexed stays.
        """
        self._seen[sample.id] = sample.split, token_digest(sample.token_ids)
        if self._unchecked is None:
            self._thread.put(sample, states)
            self._write(self._thread.take())
            return
        self._unchecked.append((sample, states))
        if len(self._unchecked) == self._config.contract_samples:
            self._check_first(self._unchecked)

    def __enter__(self) -> OnePassStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            if kind is None and self._unchecked:
                self._check_first(self._unchecked)
            if kind is None and self._unchecked is None:
                self._write(self._thread.drain())
        if kind is None:
            self._record()

    def _load_head(self) -> None:
        """Late, so that the engine has taken its memory."""
        dtype = self._manifest.dtype
        device = "cuda" if torch.cuda.is_available() else "cpu"
        head = TargetHead(self._target, dtype=getattr(torch, dtype), device=device)
        self._encoder = FeatureEncoder(self._manifest, head, self.layer_ids)
        self._contract = ContractCheck(
            self._target,
            head,
            dtype=dtype,
            temperature=self._temperature,
            tensor_parallel_size=self._tensor_parallel_size,
        )

    def _check_first(self, first: list[Captured]) -> None:
        self._load_head()
        report = self._contract.check([self._encoder.proof(*captured) for captured in first])
        report.raise_if_failed()
        config, self._unchecked = self._config, None
        writer = FeatureStoreWriter(config.store, self._manifest, max_shard_bytes=config.max_shard_bytes)
        self._writer = self._open.enter_context(writer)
        self._thread = self._open.enter_context(EncoderThread(self._encoder, most_tokens=_MOST_TOKENS))
        update_manifest(config.store, contract=report.as_dict())
        self._write(self._encoder.encode(first))

    def _write(self, encoded: Iterable[Encoded]) -> None:
        every = self._config.contract_every
        for features, captured in encoded:
            if isinstance(features, DataError):
                raise features  # what was fit when it came cannot be encoded: no single sample is to blame
            if self._written and not self._written % every:
                proof = self._encoder.proof(*captured)
                check_one_more(self._contract, proof, self._config.store, good=self._written, every=every)
            self._writer.add(features, checked=True)
            self._written += 1

    def _record(self) -> None:
        """The store belongs to the samples of this run: no fewer, no others."""
        foreign = self._stored.keys() - self._seen.keys()
        if foreign:
            raise DataError(
                f"the store {self._config.store} holds {len(foreign)} samples that are not of these prompts, e.g. "
                f"{min(foreign)}; every sample of this run is there beside them. Give each list of prompts a folder"
            )
        if (self._config.store / MANIFEST_NAME).exists():
            fingerprint = samples_fingerprint((name, *entry) for name, entry in self._seen.items())
            update_manifest(self._config.store, dataset_fingerprint=fingerprint)
            logger.info("%s: %d samples, %d captured now", self._config.store, len(self._seen), self._written)


def read_sample(row: Mapping[str, Any], split: str) -> Sample:
    """A row of the data set as extraction sees it."""
    prompt, output = row["prompt_token_ids"], row["output_token_ids"]
    return Sample(
        id=row["id"],
        split=split,
        token_ids=torch.tensor([*prompt, *output], dtype=torch.int64),
        num_prompt_tokens=len(prompt),
        spans=tuple(Span(SpanKind(span["kind"]), span["start"], span["end"]) for span in row["spans"]),
    )


def _read_stored(path: Path, manifest: StoreManifest) -> dict[str, tuple[str, str]]:
    """Sample id -> split and digest of its tokens, over the finished shards."""
    if not (path / MANIFEST_NAME).exists():
        return {}
    check_may_be_added_to(path, manifest)
    recover_store(path)
    entries = (entry for file in index_files(path) for entry in load_index(file)["samples"])
    return {entry["id"]: (entry["split"], entry["tokens"]) for entry in entries}
