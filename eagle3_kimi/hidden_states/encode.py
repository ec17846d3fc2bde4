"""From the states an engine gave to a sample in the store's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.contract import ANCHOR_LAYER_ID, ContractSample
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.finite import is_finite
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.quantize import QuantizedStates, quantize
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.topk import TopTargets


class FeatureEncoder:
    """Encodes samples for one store.

    Args:
        manifest: of the store; its format decides.
        head: the target's norm and head.
        layer_ids: boundaries that the engine captures, low to high; the aux layers and the last one among them.
    """

    def __init__(self, manifest: StoreManifest, head: TargetHead, layer_ids: tuple[int, ...]) -> None:
        self._manifest, self._head, self._layer_ids = manifest, head, layer_ids
        self._state_dtype: torch.dtype = getattr(torch, manifest.format.state_dtype)
        self._stream: torch.cuda.Stream | None = None
        if head.device.type == "cuda":  # a stream of its own, beside the engine's
            self._stream = torch.cuda.Stream(head.device)
            self._stream.wait_stream(torch.cuda.current_stream(head.device))

    def encode(self, captured: Sequence[tuple[Sample, CapturedStates]]) -> list[FeatureSample | DataError]:
        """The samples' features, in the same order; where one is not fit for the store, the error that says why.

        All are encoded together: over short samples most of the time would go into starting each small operation.
        """
        with torch.cuda.stream(self._stream):
            captured = [(sample, self._to_device(states)) for sample, states in captured]
            faults = [find_fault(sample, states) for sample, states in captured]
            good = [one for one, fault in zip(captured, faults, strict=True) if fault is None]
            encoded = iter(self._encode(good) if good else ())
            return [self._check(next(encoded)) if fault is None else fault for fault in faults]

    def proof(self, sample: Sample, states: CapturedStates) -> ContractSample:
        """What the contract check looks at."""
        return ContractSample(
            id=sample.id,
            token_ids=sample.token_ids,
            num_prompt_tokens=sample.num_prompt_tokens,
            anchor=self._layers(states, (ANCHOR_LAYER_ID,)),
            final=self._layers(states, (self._manifest.num_layers,)),
        )

    def _layers(self, states: CapturedStates, layer_ids: tuple[int, ...]) -> Tensor:
        """[S-1, len(layer_ids) * H] of the captured [S-1, L, H]."""
        assert states.hidden_states is not None  # only the first rank of a group encodes
        columns = [self._layer_ids.index(layer_id) for layer_id in layer_ids]
        return states.hidden_states[:, columns].flatten(1)

    def _encode(self, captured: Sequence[tuple[Sample, CapturedStates]]) -> Iterator[FeatureSample]:
        manifest = self._manifest
        aux = torch.cat([self._layers(states, manifest.aux_layer_ids) for _, states in captured])
        finals = [
            self._layers(states, (manifest.num_layers,))[sample.num_prompt_tokens :] for sample, states in captured
        ]
        lengths, supervised = [len(states.token_ids) for _, states in captured], [len(final) for final in finals]
        top, stored, argmax = self._targets(torch.cat(finals), supervised)
        for number, ((sample, _), states) in enumerate(zip(captured, self._aux(aux, lengths), strict=True)):
            yield FeatureSample(
                id=sample.id,
                split=sample.split,
                token_ids=sample.token_ids,
                num_prompt_tokens=sample.num_prompt_tokens,
                spans=sample.spans,
                aux_hidden_states=states,
                top_targets=top[number],
                final_hidden_states=stored[number],
                target_argmax=argmax[number],
            )

    def _to_device(self, states: CapturedStates) -> CapturedStates:
        if states.hidden_states is None:
            return states
        return replace(states, hidden_states=states.hidden_states.to(self._head.device, non_blocking=True))

    def _check(self, features: FeatureSample) -> FeatureSample | DataError:
        try:
            features.check(self._manifest)
        except DataError as error:
            return error
        return features

    def _aux(self, states: Tensor, lengths: list[int]) -> Sequence[Tensor | QuantizedStates]:
        if self._manifest.format.aux_dtype != "fp8":
            return states.to(self._state_dtype).cpu().split(lengths)
        return quantize(
            states,
            num_layers=len(self._manifest.aux_layer_ids),
            num_outliers=self._manifest.format.num_outliers,
            device=self._head.device,
        ).split(lengths)

    def _targets(
        self, final: Tensor, lengths: list[int]
    ) -> tuple[Sequence[TopTargets | None], Sequence[Tensor | None], Sequence[Tensor]]:
        """What is kept of the final states: their most likely tokens or themselves, and the target's choice."""
        nothing = [None] * len(lengths)
        if self._manifest.format.targets == "state":
            stored = final.to(self._state_dtype).cpu()
            return nothing, stored.split(lengths), self._head.argmax(final).split(lengths)
        top = self._head.find_top(final, self._manifest.format.top_k)
        return top.split(lengths), nothing, top.choice.to(torch.int64).split(lengths)


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
