"""One tensor-parallel group's share of an extraction: from captured states to shards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

import torch

from eagle3_kimi.errors import DataError, EngineError, RunStopped
from eagle3_kimi.hidden_states.capture import CaptureRequest, StateSource
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.contract import ANCHOR_LAYER_ID, ContractCheck, ContractReport, ContractSample
from eagle3_kimi.hidden_states.encode import FeatureEncoder
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.manifest import StoreManifest, update_manifest
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import Sample, SampleReader, SampleRef
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.trickle import check_one_more
from eagle3_kimi.hidden_states.writer import FeatureStoreWriter
from eagle3_kimi.progress import Progress
from eagle3_kimi.target import Target

logger = logging.getLogger(__name__)


class ShareRun:
    """One group's share. Ranks that are no leader only drive their engine.

    Args:
        config: the extraction's options.
        target: the target model.
        reader: the data set.
        manifest: of the store.
        ranks: this process's place.
        source: what captures; `ShareRun` closes it.
    """

    def __init__(
        self,
        config: ExtractConfig,
        target: Target,
        reader: SampleReader,
        manifest: StoreManifest,
        ranks: Ranks,
        source: StateSource,
    ) -> None:
        self._config, self._target, self._reader, self._manifest, self._ranks = config, target, reader, manifest, ranks
        self._source = source
        self._written = self._tokens = self._refused = self._asked = 0
        if ranks.is_leader:
            head = TargetHead(target, dtype=getattr(torch, manifest.dtype), device=ranks.device)
            self._encoder = FeatureEncoder(manifest, head, source.layer_ids)
            self._contract = ContractCheck(
                target,
                head,
                dtype=manifest.dtype,
                temperature=self._temperature(),
                tensor_parallel_size=config.tensor_parallel_size,
            )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples written, their tokens, samples refused."""
        return self._written, self._tokens, self._refused

    def extract(self, share: list[SampleRef]) -> None:
        """Captures the share; the first samples wait in memory until the contract is known.

        Raises:
            DataError: the first samples' states fail the contract; nothing is written.
            RunStopped: a later sample's do, or too many samples were refused.
        """
        self._asked = len(share)
        refs = {ref.id: ref for ref in share}
        arriving = self._source.capture(self._requests(share))
        first = list(islice(arriving, self._config.contract_samples))
        if not self._ranks.is_leader:
            self._agree_on_contract([])
            for _ in arriving:  # this rank only computes
                pass
            return
        features, proofs = [], []
        for states in first:
            sample = self._reader.read(refs[states.id])
            if encoded := self._encode(sample, states):
                features.append(encoded)
                proofs.append(self._proof(sample, states))
        del first
        report = self._agree_on_contract(proofs)
        self._write(report, features, arriving, refs)
        came = self._written + self._refused
        if came != len(share):
            raise EngineError(f"{len(share)} samples were asked for, states of {came} came back from the engine")

    def close(self) -> None:
        """Stops the engine. vLLM takes the process group down with it, so nothing is gathered afterwards."""
        self._source.close()

    def _requests(self, share: list[SampleRef]) -> Iterator[CaptureRequest]:
        for ref in share:
            yield CaptureRequest(ref.id, tuple(self._reader.read(ref).token_ids.tolist()))

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
        if self._config.temperature is not None:
            return self._config.temperature
        recorded = self._reader.provenance("temperature")
        return 1.0 if recorded is None else float(recorded)

    def _write(
        self,
        report: ContractReport,
        first: list[FeatureSample],
        arriving: Iterator[CapturedStates],
        refs: dict[str, SampleRef],
    ) -> None:
        config = self._config
        with (
            FeatureStoreWriter(
                config.output, self._manifest, rank=self._ranks.group, max_shard_bytes=config.max_shard_bytes
            ) as writer,
            Progress("hidden states", total=len(refs), active=self._ranks.is_leader) as progress,
        ):
            if self._ranks.rank == 0:
                update_manifest(config.output, contract=report.as_dict())
            while first:
                self._add(writer, first.pop(0))  # their memory goes as they are written
                self._show(progress, len(refs))
            for number, states in enumerate(arriving, start=1):
                sample = self._reader.read(refs[states.id])
                if encoded := self._encode(sample, states):
                    if number % config.contract_every == 0:
                        proof, every = self._proof(sample, states), config.contract_every
                        check_one_more(self._contract, proof, config.output, good=self._written, every=every)
                    self._add(writer, encoded)
                self._show(progress, len(refs))

    def _show(self, progress: Progress, asked: int) -> None:
        done, rate = self._written + self._refused, self._tokens / progress.seconds
        left = (asked - done) * progress.seconds / max(done, 1)
        text = f"{done:,} of {asked:,} samples, {rate:,.0f} tokens/s, about {left:,.0f} s left"
        progress.show(done, text)

    def _add(self, writer: FeatureStoreWriter, features: FeatureSample) -> None:
        try:
            writer.add(features)
        except DataError as error:
            self._refuse(error)
        else:
            self._written, self._tokens = self._written + 1, self._tokens + len(features.token_ids)

    def _encode(self, sample: Sample, states: CapturedStates) -> FeatureSample | None:
        """The sample's features; None where it was refused."""
        try:
            return self._encoder.encode(sample, states)
        except DataError as error:
            self._refuse(error)
            return None

    def _refuse(self, error: DataError) -> None:
        self._refused += 1
        logger.warning("refused: %s", error)
        if self._refused > self._config.max_refused * self._asked:
            raise RunStopped(
                f"{self._refused} of {self._asked} samples were refused, a larger share than max_refused "
                f"{self._config.max_refused:g}; the last one: {error}. What is written is good and stays"
            ) from error

    def _proof(self, sample: Sample, states: CapturedStates) -> ContractSample:
        return ContractSample(
            id=sample.id,
            token_ids=sample.token_ids,
            num_prompt_tokens=sample.num_prompt_tokens,
            anchor=self._encoder.layers(states, (ANCHOR_LAYER_ID,)),
            final=self._encoder.layers(states, (self._target.num_layers,)),
        )
