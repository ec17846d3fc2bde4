"""A data set and a target whose states are there on demand: what extraction, and training without a store, drive.

data set ──► what the target can take ──► shares by group ──► source (vLLM | transformers) ──► `ShareRun`
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.hidden_states.admission import find_unfit
from eagle3_kimi.hidden_states.capture import StateSource, VllmSource
from eagle3_kimi.hidden_states.config import CaptureOptions
from eagle3_kimi.hidden_states.contract import ANCHOR_LAYER_ID
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import SampleReader, SampleRef, plan_shares
from eagle3_kimi.hidden_states.share import ShareRun
from eagle3_kimi.hidden_states.transformers_source import TransformersSource
from eagle3_kimi.target import Target, detect_preset

logger = logging.getLogger(__name__)


class Extraction:
    """A data set and a target whose states are there on demand; the engine starts when the first are asked for.

    Args:
        options: how states are captured and encoded.
        dataset: folder of the data set.
        target: the target model.
        ranks: this process's place.
        max_length: longer samples will not be asked for; None: all may be.
        sleeps: between two calls the engine leaves the GPUs to others.

    Raises:
        RunStopped: the target cannot take too many of the samples.
    """

    def __init__(
        self,
        options: CaptureOptions,
        dataset: Path,
        target: Target,
        ranks: Ranks,
        *,
        max_length: int | None = None,
        sleeps: bool = False,
    ) -> None:
        self.options, self.target, self.ranks = options, target, ranks
        self.reader = SampleReader(dataset)
        self.manifest = build_manifest(options, target, self.reader)
        self.unfit = find_unfit(self.reader, target, accept_revisions=options.accept_revisions)
        refuse_unfit(self.unfit, len(self.reader.refs), options.max_refused)
        self.refs = [ref for ref in self.reader.refs if ref.id not in self.unfit]
        """The samples that the target can take."""
        self._max_length, self._sleeps = max_length, sleeps
        self._source: StateSource | None = None
        self._refused: set[str] = set()

    def write(self, refs: Sequence[SampleRef], output: Path) -> tuple[int, int, int]:
        """Adds the samples to the store `output`.

        Returns:
            Samples written, their tokens, samples refused, over all ranks.
        """
        self.ranks.gather(None)  # everyone has looked at the store before anyone writes
        if not refs:
            return 0, 0, 0
        share = plan_shares(refs, self.ranks.num_groups, window=self.options.window)[self.ranks.group]
        run = self.open_share()
        run.extract(share, output)
        if self._sleeps and self._source is not None:
            self._source.sleep()
        counts = [counts for counts in self.ranks.gather(run.counts if self.ranks.is_leader else None) if counts]
        written, tokens, refused = (sum(column) for column in zip(*counts, strict=True))
        return written, tokens, refused

    def open_share(self) -> ShareRun:
        """The group's way to its share of features, with the engine awake."""
        if self._source is None:
            longest = max(ref.num_tokens for ref in self.refs)
            self._source = open_source(
                self.options,
                self.target,
                self.manifest,
                self.ranks,
                longest=min(longest, self._max_length or longest),
                sleeps=self._sleeps,
            )
        elif self._sleeps:
            self._source.wake()
        return ShareRun(
            self.options,
            self.target,
            self.reader,
            self.manifest,
            self.ranks,
            self._source,
            asked=-(-len(self.refs) // self.ranks.num_groups),
            refused=self._refused,
        )

    def close(self) -> None:
        """Stops the engine. vLLM takes the process group down with it, so nothing is gathered afterwards."""
        if self._source is not None:
            self._source.close()


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
    options: CaptureOptions,
    target: Target,
    manifest: StoreManifest,
    ranks: Ranks,
    *,
    longest: int,
    sleeps: bool = False,
) -> StateSource:
    """The engine, capturing boundary 1 and the last one beside the aux layers.

    Args:
        options: which engine, and its limits.
        target: the target model.
        manifest: which layers, in which dtype.
        ranks: this process's place.
        longest: tokens of the longest sample.
        sleeps: it will be told to sleep and to wake up.
    """
    layer_ids = tuple(sorted({ANCHOR_LAYER_ID, *manifest.aux_layer_ids, target.num_layers}))
    if options.engine == "transformers":
        return TransformersSource(
            target,
            layer_ids,
            dtype=manifest.dtype,
            device=ranks.device,
            max_batched_tokens=options.max_batched_tokens,
        )
    return VllmSource(
        target,
        layer_ids,
        dtype=manifest.dtype,
        tensor_parallel_size=options.tensor_parallel_size,
        launch_id=ranks.gather(secrets.token_hex(8))[0] if ranks.world_size > 1 else None,
        max_model_len=longest,
        max_batched_tokens=options.max_batched_tokens,
        max_tokens_in_flight=options.max_tokens_in_flight,
        engine_args=options.engine_args,
        sleeps=sleeps,
    )


def build_manifest(options: CaptureOptions, target: Target, reader: SampleReader) -> StoreManifest:
    """The manifest of the store that this run makes or continues."""
    protocol = options.protocol or reader.provenance("protocol")
    if protocol is None:
        protocol = detect_preset(target.load_tokenizer(), target.config)
    return StoreManifest.describe(
        target,
        dtype=options.dtype,
        aux_layer_ids=options.aux_layer_ids,
        format=options.format,
        dataset_fingerprint=reader.fingerprint,
        protocol=protocol,
    )
