"""One tensor-parallel group's share of an extraction: from captured states to shards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from tqdm import tqdm

from eagle3_kimi.errors import DataError, EngineError, RunStopped
from eagle3_kimi.hidden_states.capture import CaptureRequest, StateSource, TransformersSource, VllmSource
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.contract import ANCHOR_LAYER_ID, ContractReport, ContractSample, check_contract
from eagle3_kimi.hidden_states.manifest import FeatureSample, StoreManifest, update_manifest
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import Sample, SampleReader, SampleRef
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.writer import FeatureStoreWriter
from eagle3_kimi.target import Target

logger = logging.getLogger(__name__)


class ShareRun:
    """One group's share: from captured states to shards."""

    def __init__(
        self,
        config: ExtractConfig,
        target: Target,
        reader: SampleReader,
        manifest: StoreManifest,
        ranks: Ranks,
        longest: int,
    ) -> None:
        self._config, self._target, self._reader, self._manifest, self._ranks = config, target, reader, manifest, ranks
        self._layer_ids = tuple(sorted({ANCHOR_LAYER_ID, *manifest.aux_layer_ids, target.num_layers}))
        self._source = self._open_source(longest)
        self._head: TargetHead | None = None
        if ranks.is_leader:
            self._head = TargetHead(target, dtype=getattr(torch, manifest.dtype), device=ranks.device)
        self._written = self._tokens = self._refused = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples written, their tokens, samples refused."""
        return self._written, self._tokens, self._refused

    def extract(self, share: list[SampleRef]) -> None:
        """Captures the share; the first samples wait in memory until the contract is known."""
        refs = {ref.id: ref for ref in share}
        arriving = self._source.capture(self._requests(share))
        first = list(islice(arriving, self._config.contract_samples))
        report = self._agree_on_contract([(self._reader.read(refs[s.id]), s) for s in first])
        if not self._ranks.is_leader:
            for _ in arriving:  # this rank only computes
                pass
            return
        self._write(report, first, arriving, refs)
        came = self._written + self._refused
        if came != len(share):
            raise EngineError(f"{len(share)} samples were asked for, states of {came} came back from the engine")

    def close(self) -> None:
        """Stops the engine. vLLM takes the process group down with it, so nothing is gathered afterwards."""
        self._source.close()

    def _open_source(self, longest: int) -> StateSource:
        config, layer_ids, dtype = self._config, self._layer_ids, self._manifest.dtype
        if config.engine == "transformers":
            return TransformersSource(
                self._target,
                layer_ids,
                dtype=dtype,
                device=self._ranks.device,
                max_batched_tokens=config.max_batched_tokens,
            )
        return VllmSource(
            self._target,
            layer_ids,
            dtype=dtype,
            tensor_parallel_size=config.tensor_parallel_size,
            external_launcher=self._ranks.world_size > 1,
            max_model_len=longest,
            max_batched_tokens=config.max_batched_tokens,
            max_tokens_in_flight=config.max_tokens_in_flight,
            engine_args=config.engine_args,
        )

    def _requests(self, share: list[SampleRef]) -> Iterator[CaptureRequest]:
        for ref in share:
            yield CaptureRequest(ref.id, tuple(self._reader.read(ref).token_ids.tolist()))

    def _agree_on_contract(self, first: list[tuple[Sample, CapturedStates]]) -> ContractReport:
        """Every group checks its own first samples; a fault in one of them stops all."""
        report = None
        if self._head is not None and first:
            report = check_contract(
                [
                    ContractSample(
                        id=sample.id,
                        token_ids=sample.token_ids,
                        num_prompt_tokens=sample.num_prompt_tokens,
                        anchor=self._layers(states, (ANCHOR_LAYER_ID,)),
                        final=self._layers(states, (self._target.num_layers,)),
                    )
                    for sample, states in first
                ],
                self._target,
                self._head,
                dtype=self._manifest.dtype,
                temperature=self._temperature(),
            )
        reports = [report for report in self._ranks.gather(report) if report is not None]
        for other in reports:
            other.raise_if_failed()
        return min(reports, key=lambda other: other.agreement)

    def _temperature(self) -> float:
        if self._config.temperature is not None:
            return self._config.temperature
        recorded = self._reader.provenance("temperature")
        return 1.0 if recorded is None else float(recorded)

    def _write(
        self,
        report: ContractReport,
        first: list[CapturedStates],
        arriving: Iterator[CapturedStates],
        refs: dict[str, SampleRef],
    ) -> None:
        config = self._config
        with (
            FeatureStoreWriter(
                config.output, self._manifest, rank=self._ranks.group, max_shard_bytes=config.max_shard_bytes
            ) as writer,
            tqdm(total=len(refs), unit=" samples", desc="hidden states", disable=None) as bar,
        ):
            update_manifest(config.output, contract=report.as_dict())
            for states in _chain(first, arriving):
                sample = self._reader.read(refs[states.id])
                try:
                    writer.add(self._build_features(sample, states))
                    self._written, self._tokens = self._written + 1, self._tokens + len(sample.token_ids)
                except DataError as error:
                    self._refuse(error)
                bar.update()

    def _refuse(self, error: DataError) -> None:
        self._refused += 1
        logger.warning("refused: %s", error)
        if self._refused > self._config.max_bad_samples:
            raise RunStopped(
                f"{self._refused} samples were refused, more than max_bad_samples; the last one: {error}. "
                "What is written is good and stays"
            ) from error

    def _build_features(self, sample: Sample, states: CapturedStates) -> FeatureSample:
        if not torch.equal(states.token_ids, sample.token_ids[:-1]):
            raise DataError(
                f"sample {sample.id}: the engine saw {len(states.token_ids)} tokens, the data set says "
                f"{len(sample.token_ids) - 1}, or others"
            )
        assert self._head is not None  # only leaders get here
        final = self._layers(states, (self._target.num_layers,))[sample.num_prompt_tokens :]
        return FeatureSample(
            id=sample.id,
            split=sample.split,
            token_ids=sample.token_ids,
            num_prompt_tokens=sample.num_prompt_tokens,
            spans=sample.spans,
            aux_hidden_states=self._layers(states, self._manifest.aux_layer_ids),
            final_hidden_states=final,
            target_argmax=self._head.argmax(final),
        )

    def _layers(self, states: CapturedStates, layer_ids: tuple[int, ...]) -> Tensor:
        """[S-1, len(layer_ids) * H] of the captured [S-1, L, H]."""
        assert states.hidden_states is not None  # only leaders get here
        columns = [self._layer_ids.index(layer_id) for layer_id in layer_ids]
        return states.hidden_states[:, columns].flatten(1)


def _chain(first: list[CapturedStates], rest: Iterator[CapturedStates]) -> Iterator[CapturedStates]:
    while first:
        yield first.pop(0)  # their memory goes as they are written
    yield from rest
