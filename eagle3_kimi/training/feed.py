"""From planned global batches to this rank's packed micro-batches, wherever the features come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch.utils.data import DataLoader

from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.training.batches import MicroBatches, PackedBatch, deal
from eagle3_kimi.training.sources import Aside, FeatureSource, Split

StepInput = tuple[Iterator[PackedBatch], int]
"""Where this rank's micro-batches of a global batch come next, and how many."""


def feed_steps(
    source: FeatureSource,
    split: str,
    batches: Sequence[Sequence[int]],
    *,
    micro_batch_tokens: int,
    world_size: int,
    ttt_steps: int,
    num_workers: int,
    start: int,
    aside: Aside,
) -> Iterator[StepInput]:
    """The global batches from number `start` on.

    Args:
        source: of the features.
        split: `train` or `validation`.
        batches: all global batches of the run.
        micro_batch_tokens: tokens a process holds at once.
        world_size: number of ranks.
        ttt_steps: K.
        num_workers: processes that read ahead, where there is something to read.
        start: the first one.
        aside: see `Aside`.
    """
    samples: Split = source.train if split == "train" else source.validation
    lengths, hidden_size = samples.lengths, samples.manifest.hidden_size
    steps = [deal(batch, lengths, micro_batch_tokens=micro_batch_tokens, world_size=world_size) for batch in batches]
    for part in source.parts(split, steps, start=start, aside=aside):
        dataset = MicroBatches(
            part.samples,
            [micro for step in part.micro_batches for micro in step],
            ttt_steps,
            aux_width=len(samples.manifest.aux_layer_ids) * hidden_size,
            hidden_size=hidden_size,
        )
        loader = DataLoader(dataset, batch_size=None, num_workers=num_workers if source.on_disk else 0)
        packed: Iterator[PackedBatch] = iter(loader)
        for step in part.micro_batches:
            yield packed, len(step)
        next(packed, None)  # there is none, which ends the workers: they have the part open


def read_everywhere(source: FeatureSource, indices: Sequence[int], *, world_size: int) -> Iterator[FeatureSample]:
    """Some training samples' features, the same on every rank, before there is a model to be set aside."""
    steps = [[[index]] * world_size for index in indices]
    for part in source.parts("train", steps, start=0, aside=contextlib.nullcontext):
        for micro_batch in (micro_batch for step in part.micro_batches for micro_batch in step):
            yield from (part.samples[index] for index in micro_batch)
