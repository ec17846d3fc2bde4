"""Batches of whole samples, packed without padding, in an order that no number of processes changes.

An epoch is shuffled by seed and cut into *global batches* of about `batch_tokens` tokens, one optimizer step each. A
global batch is dealt to as many micro-batches as memory asks for, a multiple of the world size. Because loss and
gradients are sums divided once by the global number of supervised tokens, the dealing changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.quantize import QuantizedStates
from eagle3_kimi.hidden_states.topk import TopTargets
from eagle3_kimi.training.sources import Readable, Split
from eagle3_kimi.training.spans import read_span_kinds


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Some samples end to end. T rows, M supervised rows, A aux layers, H hidden size."""

    ids: tuple[str, ...]
    """Sample ids, to name a batch that goes wrong."""
    num_tokens: int
    aux_hidden_states: Tensor | QuantizedStates
    """[T, A*H]; quantised until `to`, so that fewer bytes travel to the device."""
    input_ids: Tensor
    """int64 [T], the token after each row's own."""
    chain_ids: Tensor
    """int64 [M], tokens at the positions P..S-2."""
    final_hidden_states: Tensor | None
    """[M, H], before the final norm, at the same positions; None where there are `top_targets`."""
    top_targets: TopTargets | None
    """[M, k], at the same positions."""
    target_argmax: Tensor
    """int64 [M], at the same positions."""
    span_kinds: Tensor
    """int64 [M], of `read_span_kinds`."""
    rows: PackedRows

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> PackedBatch:
        """On `device`, states in `dtype`."""
        aux, final, top = self.aux_hidden_states, self.final_hidden_states, self.top_targets
        if isinstance(aux, QuantizedStates):
            aux = aux.to(device, non_blocking=True).decode(dtype)
        return replace(
            self,
            aux_hidden_states=aux.to(device, dtype, non_blocking=True),
            final_hidden_states=None if final is None else final.to(device, dtype, non_blocking=True),
            top_targets=None if top is None else top.to(device, non_blocking=True),
            input_ids=self.input_ids.to(device, non_blocking=True),
            chain_ids=self.chain_ids.to(device, non_blocking=True),
            target_argmax=self.target_argmax.to(device, non_blocking=True),
            span_kinds=self.span_kinds.to(device, non_blocking=True),
            rows=self.rows.to(device),
        )


def pack(samples: Sequence[FeatureSample], ttt_steps: int, *, aux_width: int, hidden_size: int) -> PackedBatch:
    """Packs samples of at least two output tokens each; none at all gives an empty batch, which trains nothing."""
    empty = torch.empty(0, dtype=torch.int64)
    return PackedBatch(
        ids=tuple(sample.id for sample in samples),
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        aux_hidden_states=_join_aux(samples, aux_width),
        input_ids=torch.cat([empty, *(s.token_ids[1:-1] for s in samples)]),
        chain_ids=torch.cat([empty, *(s.token_ids[s.num_prompt_tokens : -1] for s in samples)]),
        final_hidden_states=_join_final(samples, hidden_size),
        top_targets=_join_top(samples),
        target_argmax=torch.cat([empty, *(s.target_argmax for s in samples)]),
        span_kinds=torch.cat([empty, *(read_span_kinds(s) for s in samples)]),
        rows=PackedRows.build([(s.num_prompt_tokens - 1, len(s.target_argmax)) for s in samples], ttt_steps),
    )


def _join_aux(samples: Sequence[FeatureSample], width: int) -> Tensor | QuantizedStates:
    """Rows 0..S-3 of each sample: the last state predicts nothing."""
    states = [sample.aux_hidden_states for sample in samples]
    quantized = [part.map(lambda rows: rows[:-1]) for part in states if isinstance(part, QuantizedStates)]
    if quantized:
        return QuantizedStates.cat(quantized)
    plain = [part[:-1] for part in states if isinstance(part, Tensor)]
    return torch.cat(plain) if plain else torch.empty(0, width)


def _join_final(samples: Sequence[FeatureSample], hidden_size: int) -> Tensor | None:
    if not samples:
        return torch.empty(0, hidden_size)
    parts = [sample.final_hidden_states for sample in samples if sample.final_hidden_states is not None]
    return torch.cat(parts) if parts else None


def _join_top(samples: Sequence[FeatureSample]) -> TopTargets | None:
    parts = [sample.top_targets for sample in samples if sample.top_targets is not None]
    return TopTargets.cat(parts) if parts else None


def select_trainable(samples: Split, max_length: int) -> tuple[list[int], dict[str, int]]:
    """Indices of the samples to train on, and how many were refused and why. Nothing is truncated.

    Raises:
        DataError: none is left.
    """
    kept, refused = select_held_out(samples, max_length)
    if not kept:
        raise DataError(f"none of {len(samples)} samples can be trained on: {refused}, with max_length {max_length}")
    return kept, refused


def select_held_out(samples: Split, max_length: int) -> tuple[list[int], dict[str, int]]:
    """The same for a split that may be empty."""
    kept: list[int] = []
    refused = {"too_long": 0, "no_supervised_tokens": 0}
    for index, (length, prompt) in enumerate(zip(samples.lengths, samples.prompt_lengths, strict=True)):
        if length > max_length:
            refused["too_long"] += 1
        elif length - 1 <= prompt:
            refused["no_supervised_tokens"] += 1
        else:
            kept.append(index)
    return kept, refused


def plan_epoch(
    indices: Sequence[int], lengths: Sequence[int], *, batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """The shuffled global batches of an epoch."""
    order = sorted(indices)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return cut_batches(order, lengths, batch_tokens=batch_tokens)


def cut_batches(order: Sequence[int], lengths: Sequence[int], *, batch_tokens: int) -> list[list[int]]:
    """Global batches of sample indices in the given order, each as full as the next sample allows."""
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def deal(batch: Sequence[int], lengths: Sequence[int], *, micro_batch_tokens: int, world_size: int) -> list[list[int]]:
    """Splits a global batch into balanced micro-batches, a multiple of `world_size`, none above the budget.

    The longest sample goes first, each to the emptiest micro-batch. Some may stay empty: every rank takes part in every
    step. Rank r takes micro-batches r, r + world_size, ...
    """
    order = sorted(batch, key=lambda index: (-lengths[index], index))
    needed = -(-sum(lengths[index] for index in batch) // micro_batch_tokens)
    count = -(-max(needed, 1) // world_size) * world_size
    while True:
        parts: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for index in order:
            emptiest = filled.index(min(filled))
            parts[emptiest].append(index)
            filled[emptiest] += lengths[index]
        if max(filled) <= micro_batch_tokens or count >= len(batch):
            return parts
        count += world_size


class MicroBatches(Dataset[PackedBatch]):
    """The packed micro-batches of one rank, in order: what a `DataLoader(..., batch_size=None)` walks through."""

    def __init__(
        self, samples: Readable, parts: Sequence[Sequence[int]], ttt_steps: int, *, aux_width: int, hidden_size: int
    ) -> None:
        self.samples, self.parts, self.ttt_steps = samples, parts, ttt_steps
        self.aux_width, self.hidden_size = aux_width, hidden_size

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> PackedBatch:
        samples = [self.samples[index] for index in self.parts[i]]
        return pack(samples, self.ttt_steps, aux_width=self.aux_width, hidden_size=self.hidden_size)
