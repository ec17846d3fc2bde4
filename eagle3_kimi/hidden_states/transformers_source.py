"""Hidden states from transformers, for a target that fits on one device; the reference for the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.hidden_states.capture import CaptureRequest
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.target import Target


class TransformersSource:
    """One forward pass of transformers over padded batches, states through hooks.

    Args:
        target: the target model; it must fit on one device.
        layer_ids: boundary ids to capture, ascending.
        dtype: `float32` or `bfloat16`.
        device: where to run it.
        max_batched_tokens: tokens of one batch, padding included.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: tuple[int, ...],
        *,
        dtype: str,
        device: torch.device | str = "cpu",
        max_batched_tokens: int = 8192,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.layer_ids = layer_ids
        self._max_batched_tokens = max_batched_tokens
        model = AutoModelForCausalLM.from_pretrained(
            str(target.path), dtype=getattr(torch, dtype), trust_remote_code=target.trust_remote_code
        )
        self._device = torch.device(device)
        self._decoder = model.get_decoder().to(self._device).eval()
        self._captured: dict[int, Tensor] = {}
        layers = self._decoder.layers
        for layer_id in layer_ids:
            # HF's own hidden_states[-1] is after the final norm, so the last boundary needs a hook of its own
            if layer_id == len(layers):
                layers[-1].register_forward_hook(self._keep_output(layer_id))
            else:
                layers[layer_id].register_forward_pre_hook(self._keep_input(layer_id), with_kwargs=True)

    @torch.inference_mode()
    def capture(self, requests: Iterable[CaptureRequest]) -> Iterator[CapturedStates]:
        """Batches neighbours: sort by length for little padding."""
        for batch in _batches(requests, self._max_batched_tokens):
            lengths = [len(request.token_ids) - 1 for request in batch]
            ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                ids[row, : lengths[row]] = torch.tensor(request.token_ids[:-1])
                mask[row, : lengths[row]] = 1
            self._decoder(input_ids=ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False)
            states = torch.stack([self._captured.pop(layer_id) for layer_id in self.layer_ids], dim=2).cpu()
            for row, request in enumerate(batch):
                yield CapturedStates(request.id, ids[row, : lengths[row]], states[row, : lengths[row]])

    def sleep(self) -> None:
        """The model to the host's memory."""
        self._decoder.to("cpu")

    def wake(self) -> None:
        """The model is back."""
        self._decoder.to(self._device)

    def close(self) -> None:
        """Frees the model."""
        del self._decoder

    def _keep_input(self, layer_id: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer_id] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _keep_output(self, layer_id: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook


def _batches(requests: Iterable[CaptureRequest], max_tokens: int) -> Iterator[list[CaptureRequest]]:
    """Groups neighbours so that rows times the longest stay within `max_tokens`."""
    batch: list[CaptureRequest] = []
    longest = 0
    for request in requests:
        longest_now = max(longest, len(request.token_ids))
        if batch and (len(batch) + 1) * longest_now > max_tokens:
            yield batch
            batch, longest_now = [], len(request.token_ids)
        batch.append(request)
        longest = longest_now
    if batch:
        yield batch
