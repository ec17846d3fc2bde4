"""From the states an engine gave to a sample in the store's format."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
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

    def encode(self, sample: Sample, states: CapturedStates) -> FeatureSample:
        """The sample's features.

        Raises:
            DataError: the states are not those of the sample's tokens, or not finite.
        """
        came = 0 if states.hidden_states is None else len(states.hidden_states)
        if states.hidden_states is None or came != len(states.token_ids):
            raise DataError(f"sample {sample.id}: states of {came} tokens came for {len(states.token_ids)} tokens")
        if not torch.equal(states.token_ids, sample.token_ids[:-1]):
            raise DataError(
                f"sample {sample.id}: the engine saw {len(states.token_ids)} tokens, the data set says "
                f"{len(sample.token_ids) - 1}, or others"
            )
        if not bool(torch.isfinite(states.hidden_states).all()):
            raise DataError(f"sample {sample.id}: the engine's states hold NaN or infinite values")
        final = self.layers(states, (self._manifest.num_layers,))[sample.num_prompt_tokens :]
        top, stored, argmax = self._targets(final)
        return FeatureSample(
            id=sample.id,
            split=sample.split,
            token_ids=sample.token_ids,
            num_prompt_tokens=sample.num_prompt_tokens,
            spans=sample.spans,
            aux_hidden_states=self._aux(self.layers(states, self._manifest.aux_layer_ids)),
            final_hidden_states=stored,
            top_targets=top,
            target_argmax=argmax,
        )

    def layers(self, states: CapturedStates, layer_ids: tuple[int, ...]) -> Tensor:
        """[S-1, len(layer_ids) * H] of the captured [S-1, L, H]."""
        assert states.hidden_states is not None  # only the first rank of a group encodes
        columns = [self._layer_ids.index(layer_id) for layer_id in layer_ids]
        return states.hidden_states[:, columns].flatten(1)

    def _aux(self, states: Tensor) -> Tensor | QuantizedStates:
        if self._manifest.format.aux_dtype != "fp8":
            return states.to(self._state_dtype)
        return quantize(
            states,
            num_layers=len(self._manifest.aux_layer_ids),
            num_outliers=self._manifest.format.num_outliers,
            device=self._head.device,
        )

    def _targets(self, final: Tensor) -> tuple[TopTargets | None, Tensor | None, Tensor]:
        """What is kept of the final states: their most likely tokens or themselves, and the target's choice."""
        if self._manifest.format.targets == "state":
            return None, final.to(self._state_dtype), self._head.argmax(final)
        top = self._head.find_top(final, self._manifest.format.top_k)
        return top, None, top.choice.to(torch.int64)
