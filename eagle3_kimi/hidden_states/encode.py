"""From the states an engine gave to a sample in the store's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.contract import ANCHOR_LAYER_ID, ContractSample
from eagle3_kimi.hidden_states.feature_sample import FeatureSample, find_bad_values
from eagle3_kimi.hidden_states.finite import is_finite
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.quantize import QuantizedStates, quantize
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.hidden_states.tensor_rows import TensorRows, split_rows
from eagle3_kimi.hidden_states.topk import TopTargets

Captured = tuple[Sample, CapturedStates]
Encoded = tuple[FeatureSample | DataError, Captured]
"""What is kept of captured states, or why they are not fit for the store."""


class Head(Protocol):
    """The target's head, or a group's way to it."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def find_top(self, states: Tensor, k: int) -> TopTargets:
        """See `TargetHead.find_top`."""
        ...

    def argmax(self, states: Tensor) -> Tensor:
        """See `TargetHead.argmax`."""
        ...


class FeatureEncoder:
    """Encodes samples for one store.

    Args:
        manifest: of the store; its format decides.
        head: the target's norm and head.
        layer_ids: boundaries that the engine captures, low to high; the aux layers and the last one among them.
    """

    def __init__(self, manifest: StoreManifest, head: Head, layer_ids: tuple[int, ...]) -> None:
        self._manifest, self._head, self._layer_ids = manifest, head, layer_ids
        self._state_dtype: torch.dtype = getattr(torch, manifest.format.state_dtype)
        self._stream = open_stream(head.device)

    def encode(self, captured: Sequence[Captured]) -> list[Encoded]:
        """Each sample with its features, or with the error that says why it is not fit for the store; in order.

        All are encoded and looked at together: over short samples most of the time would go into starting each small
        operation.
        """
        with torch.cuda.stream(self._stream):
            on_device = [(sample, self._to_device(states)) for sample, states in captured]
            faults = _find_faults(on_device)
            good = [states for (_, states), fault in zip(on_device, faults, strict=True) if fault is None]
            aux = self._aux(good)
            finals = [self._final(*one) for one in on_device]
            top, final, argmax = self._targets(finals)
            token_ids = torch.cat([sample.token_ids for sample, _ in captured])
            values = [token_ids, argmax, *_tensors_of(aux), *_tensors_of(top), *_tensors_of(final)]
            bad = any(faults) or find_bad_values(enumerate(values), self._manifest.vocab_size)
            check = FeatureSample.check if bad else FeatureSample.check_layout
            aux_parts = iter(_split(aux, [len(states.token_ids) for states in good]))
            lengths = [len(one) for one in finals]
            targets = zip(*(_split(rows, lengths) for rows in (top, final, argmax)), strict=True)
            return [
                (fault or self._checked(check, one[0], next(aux_parts), *target), one)
                for one, fault, target in zip(captured, faults, targets, strict=True)
            ]

    def proof(self, sample: Sample, states: CapturedStates) -> ContractSample:
        """What the contract check looks at."""
        return ContractSample(
            id=sample.id,
            token_ids=sample.token_ids,
            num_prompt_tokens=sample.num_prompt_tokens,
            anchor=self._columns(_states_of(states), (ANCHOR_LAYER_ID,)),
            final=self._columns(_states_of(states), (self._manifest.num_layers,)),
        )

    def _columns(self, states: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
        """[S-1, len(layer_ids) * H] of the captured [S-1, L, H]."""
        columns = [self._layer_ids.index(layer_id) for layer_id in layer_ids]
        return states[:, columns].flatten(1)

    def _to_device(self, states: CapturedStates) -> CapturedStates:
        if states.hidden_states is None:
            return states
        return replace(states, hidden_states=states.hidden_states.to(self._head.device, non_blocking=True))

    def _final(self, sample: Sample, states: CapturedStates) -> Tensor:
        if states.hidden_states is None:
            return torch.empty(0, self._manifest.hidden_size)
        return supervised_states(sample, states)

    def _checked(
        self,
        check: Callable[[FeatureSample, StoreManifest], None],
        sample: Sample,
        aux: Tensor | QuantizedStates,
        top: TopTargets | None,
        final: Tensor | None,
        argmax: Tensor,
    ) -> FeatureSample | DataError:
        features = FeatureSample(
            id=sample.id,
            split=sample.split,
            token_ids=sample.token_ids,
            num_prompt_tokens=sample.num_prompt_tokens,
            spans=sample.spans,
            aux_hidden_states=aux,
            top_targets=top,
            final_hidden_states=final,
            target_argmax=argmax,
        )
        try:
            check(features, self._manifest)
        except DataError as error:
            return error
        return features

    def _aux(self, captured: list[CapturedStates]) -> Tensor | QuantizedStates | None:
        """Rows of all, one after the other."""
        if not captured:
            return None
        states = _cat([self._columns(_states_of(one), self._manifest.aux_layer_ids) for one in captured])
        if self._manifest.format.aux_dtype != "fp8":
            return states.to(self._state_dtype).cpu()
        return quantize(
            states,
            num_layers=len(self._manifest.aux_layer_ids),
            num_outliers=self._manifest.format.num_outliers,
            device=self._head.device,
        )

    def _targets(self, finals: list[Tensor]) -> tuple[TopTargets | None, Tensor | None, Tensor]:
        """What is kept of the final states: their most likely tokens or themselves, and the target's choice.

        Of all samples, good or bad: other ranks may compute their share of them at the same time.
        """
        final = _cat(finals)
        if self._manifest.format.targets == "state":
            return None, final.to(self._state_dtype).cpu(), self._head.argmax(final)
        top = self._head.find_top(final, self._manifest.format.top_k)
        return top, None, top.choice.to(torch.int64)


def _cat(parts: list[Tensor]) -> Tensor:
    """All rows; a long sample, which is alone, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tensors_of(rows: TensorRows | Tensor | None) -> list[Tensor]:
    if rows is None:
        return []
    return [rows] if isinstance(rows, Tensor) else list(rows.tensors().values())


def _split(rows: TensorRows | Tensor | None, lengths: Sequence[int]) -> Sequence[Any]:
    if rows is None:
        return [None] * len(lengths)
    return split_rows(rows, lengths) if isinstance(rows, Tensor) else rows.split(lengths)


def open_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream beside the engine's, after what has been started so far; None, which changes nothing, on a CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def supervised_states(sample: Sample, states: CapturedStates) -> Tensor:
    """[S-1-P, H]: the last captured layer where the target's own tokens follow."""
    return _states_of(states)[sample.num_prompt_tokens :, -1]


def _states_of(states: CapturedStates) -> Tensor:
    assert states.hidden_states is not None  # the first rank of a group has them, and faults are found before
    return states.hidden_states


def _find_faults(captured: Sequence[Captured]) -> list[DataError | None]:
    """`find_fault` of each; one by one only if together they show that there is one."""
    if len(captured) > 1 and _are_fit(captured):
        return [None] * len(captured)
    return [find_fault(*one) for one in captured]


def _are_fit(captured: Sequence[Captured]) -> bool:
    states = [states.hidden_states for _, states in captured if states.hidden_states is not None]
    expected = [len(sample.token_ids) - 1 for sample, _ in captured]
    if expected != [len(one) for one in states] or expected != [len(states.token_ids) for _, states in captured]:
        return False
    came = torch.cat([states.token_ids for _, states in captured])
    sums = torch.stack([one.sum(dtype=torch.float32) for one in states])  # states are large: they are not copied
    return torch.equal(came, torch.cat([sample.token_ids[:-1] for sample, _ in captured])) and is_finite(sums)


def find_fault(sample: Sample, states: CapturedStates) -> DataError | None:
    """Why these are not the sample's states, if they are not."""
    came = 0 if states.hidden_states is None else len(states.hidden_states)
    if states.hidden_states is None or came != len(states.token_ids):
        return DataError(f"sample {sample.id}: states of {came} tokens came for {len(states.token_ids)} tokens")
    if not torch.equal(states.token_ids, sample.token_ids[:-1]):
        return DataError(
            f"sample {sample.id}: the engine saw {len(states.token_ids)} tokens, the data set says "
            f"{len(sample.token_ids) - 1}, or others"
        )
    if not is_finite(states.hidden_states):
        return DataError(f"sample {sample.id}: the engine's states hold NaN or infinite values")
    return None
