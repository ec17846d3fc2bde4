"""One tensor-parallel group's share of a data set: from captured states to features, and on to shards."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import torch

from eagle3_kimi.errors import DataError, EngineError, RunStopped
from eagle3_kimi.hidden_states.capture import CaptureRequest, StateSource
from eagle3_kimi.hidden_states.config import CaptureOptions
from eagle3_kimi.hidden_states.contract import ContractCheck, ContractReport, ContractSample
from eagle3_kimi.hidden_states.encode import Captured, Encoded, FeatureEncoder
from eagle3_kimi.hidden_states.encoder_thread import Encoder, EncoderThread
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.manifest import StoreManifest, update_manifest
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import Sample, SampleReader, SampleRef
from eagle3_kimi.hidden_states.shared_head import HelpingEncoder, SharedHead
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.trickle import check_one_more
from eagle3_kimi.hidden_states.writer import FeatureStoreWriter
from eagle3_kimi.progress import Progress
from eagle3_kimi.target import Target

logger = logging.getLogger(__name__)


class ShareRun:
    """One group's share. Ranks that are no leader drive their engine, and help with the head.

    The contract is agreed on once, on the first samples of the first call; later ones are checked now and then.

    Args:
        options: how states are captured and encoded.
        target: the target model.
        reader: the data set.
        manifest: of what is made.
        ranks: this process's place.
        source: what captures.
        asked: samples that the group will be asked for in all; refusals are a share of them.
        refused: ids that were refused before; added to.
    """

    def __init__(
        self,
        options: CaptureOptions,
        target: Target,
        reader: SampleReader,
        manifest: StoreManifest,
        ranks: Ranks,
        source: StateSource,
        *,
        asked: int,
        refused: set[str],
    ) -> None:
        self._options, self._target, self._reader, self._manifest = options, target, reader, manifest
        self._ranks, self._source, self._asked = ranks, source, asked
        self._report: ContractReport | None = None
        self._made = self._tokens = self._unchecked = 0
        self._refused = refused
        self._encoder: Encoder
        dtype = getattr(torch, manifest.dtype)
        shared = None
        if ranks.tensor_parallel_size > 1:
            shared = SharedHead(target, manifest.vocab_size, dtype=dtype, ranks=ranks)
            if not ranks.is_leader:
                self._encoder = HelpingEncoder(shared, manifest.format)
                return
        head = TargetHead(target, dtype=dtype, device=ranks.device)
        self._encoder = self._feature_encoder = FeatureEncoder(manifest, shared or head, source.layer_ids)
        self._contract = ContractCheck(
            target,
            head,
            dtype=manifest.dtype,
            temperature=self._temperature(),
            tensor_parallel_size=options.tensor_parallel_size,
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples made, their tokens, samples refused."""
        return self._made, self._tokens, len(self._refused)

    def extract(self, share: list[SampleRef], output: Path) -> None:
        """Writes the share's features to the store `output`.

        Raises:
            DataError: the first samples' states fail the contract; nothing is written.
            RunStopped: a later sample's do, or too many samples were refused; what is written is good and stays.
        """
        features = self.compute(share, store=output)
        first = next(features, None)  # the contract holds now: a fault leaves no store
        if not self._ranks.is_leader:
            return
        assert self._report is not None  # what `compute` begins with
        contract, size = self._report.as_dict(), self._options.max_shard_bytes
        manifest = replace(self._manifest, contract=contract)  # whichever leader comes first writes the same
        with (
            FeatureStoreWriter(output, manifest, rank=self._ranks.group, max_shard_bytes=size) as writer,
            Progress("hidden states", total=len(share), active=True) as progress,
        ):
            if self._ranks.rank == 0:
                update_manifest(output, contract=contract)
            for sample in chain(() if first is None else (first,), features):
                writer.add(sample, checked=True)
                self._show(progress, len(share))

    def compute(self, share: list[SampleRef], *, store: Path | None = None) -> Iterator[FeatureSample]:
        """The share's features, in no particular order, without those that are refused; a leader's alone.

        The first samples wait in memory until the contract is known. Every rank of every group walks through it.

        Args:
            share: what to capture.
            store: where the features go, to be marked when a later sample fails the contract.

        Raises:
            DataError: the first samples' states fail the contract.
            RunStopped: a later sample's do, or too many samples were refused.
        """
        came = 0
        sent: dict[str, Sample] = {}  # those in the engine
        captured = ((sent.pop(states.id), states) for states in self._source.capture(self._requests(share, sent)))
        if self._report is None:
            first = list(islice(captured, self._options.contract_samples))
            came, good = len(first), self._prove(first)
            del first
            while good:
                yield self._count(good.pop(0))  # their memory goes as they are taken
        with EncoderThread(self._encoder, most_tokens=self._options.max_batched_tokens) as thread:
            for one in captured:
                thread.put(*one)
                came += 1
                yield from self._take(thread.take(), store)
            yield from self._take(thread.drain(), store)
        if came != len(share):
            raise EngineError(f"{len(share)} samples were asked for, states of {came} came back from the engine")

    def _requests(self, share: list[SampleRef], sent: dict[str, Sample]) -> Iterator[CaptureRequest]:
        for ref in share:
            sent[ref.id] = sample = self._reader.read(ref)
            yield CaptureRequest(ref.id, tuple(sample.token_ids.tolist()))

    def _prove(self, first: list[Captured]) -> list[FeatureSample]:
        """Agrees on the contract; a leader's features of its first samples."""
        encoded = self._without_bad(self._encoder.encode(first)) if first else ()
        good = [(features, self._feature_encoder.proof(*captured)) for features, captured in encoded]
        self._report = self._agree_on_contract([proof for _, proof in good])
        return [features for features, _ in good]

    def _take(self, encoded: Iterable[Encoded], store: Path | None) -> Iterator[FeatureSample]:
        """The features that are good; now and then after one more check of the contract."""
        for features, captured in self._without_bad(encoded):
            self._unchecked += 1
            if self._unchecked >= self._options.contract_every:
                self._unchecked = 0
                every = self._options.contract_every
                check_one_more(
                    self._contract, self._feature_encoder.proof(*captured), store, good=self._made, every=every
                )
            yield self._count(features)

    def _count(self, features: FeatureSample) -> FeatureSample:
        self._made, self._tokens = self._made + 1, self._tokens + len(features.token_ids)
        return features

    def _agree_on_contract(self, proofs: list[ContractSample]) -> ContractReport:
        """Every group checks its own first samples; a fault in one of them stops all."""
        report = self._contract.check(proofs) if proofs else None
        reports = [report for report in self._ranks.gather(report) if report is not None]
        for other in reports:
            other.raise_if_failed()
        if not reports:
            raise DataError("all of the first samples were refused: there are no states that the contract could check")
        return min(reports, key=lambda other: other.agreement)

    def _temperature(self) -> float:
        if self._options.temperature is not None:
            return self._options.temperature
        recorded = self._reader.provenance("temperature")
        return 1.0 if recorded is None else float(recorded)

    def _show(self, progress: Progress, asked: int) -> None:
        done, rate = self._made + len(self._refused), self._tokens / progress.seconds
        left = (asked - done) * progress.seconds / max(done, 1)
        text = f"{done:,} of {asked:,} samples, {rate:,.0f} tokens/s, about {left:,.0f} s left"
        progress.show(done, text)

    def _without_bad(self, encoded: Iterable[Encoded]) -> Iterator[tuple[FeatureSample, Captured]]:
        """Refuses the others, and counts them."""
        for features, captured in encoded:
            if isinstance(features, FeatureSample):
                yield features, captured
            else:
                self._refuse(captured[0].id, features)

    def _refuse(self, sample: str, error: DataError) -> None:
        self._refused.add(sample)
        logger.warning("refused: %s", error)
        if len(self._refused) > self._options.max_refused * self._asked:
            raise RunStopped(
                f"{len(self._refused)} of {self._asked} samples were refused, a larger share than max_refused "
                f"{self._options.max_refused:g}; the last one: {error}. What is written is good and stays"
            ) from error
