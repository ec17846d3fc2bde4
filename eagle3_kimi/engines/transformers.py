"""The target under plain transformers: slow, everywhere, and a second opinion on vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eagle3_kimi.engines.base import (
    EngineInfo,
    EngineOptions,
    Generation,
    GenerationRequest,
    SamplingOptions,
    refuse_long_prompt,
)
from eagle3_kimi.errors import EngineError
from eagle3_kimi.target import Target

if TYPE_CHECKING:
    import torch

_BATCH_SIZE = 32


def load_model(target: Target, dtype: str) -> Any:
    """The target's causal language model in evaluation mode, on the GPU where there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(target.path), dtype=dtype, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise EngineError(f"transformers cannot load {target.name} ({target.path}): {error}") from error
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


class TransformersEngine:
    """Generates in batches with left padding; each sequence has a random generator of its own."""

    def __init__(self, target: Target, options: EngineOptions) -> None:
        import transformers

        self._model = load_model(target, options.dtype)
        self._max_model_len = options.max_model_len or int(target.config["max_position_embeddings"])
        device = str(self._model.device.type)
        self.info = EngineInfo(name="transformers", version=transformers.__version__, device=device)

    def generate(
        self, queue: deque[GenerationRequest], sampling: SamplingOptions, stop_token_ids: tuple[int, ...]
    ) -> Iterator[Generation]:
        """See `TargetEngine.generate`."""
        while queue:
            batch: list[GenerationRequest] = []
            while queue and len(batch) < _BATCH_SIZE:
                request = queue.popleft()
                if refused := refuse_long_prompt(request, self._max_model_len):
                    yield refused
                else:
                    batch.append(request)
            if batch:
                yield from self._generate_batch(batch, sampling, frozenset(stop_token_ids))

    def _generate_batch(
        self, batch: list[GenerationRequest], sampling: SamplingOptions, stop: frozenset[int]
    ) -> Iterator[Generation]:
        import torch

        device = self._model.device
        longest = max(len(r.prompt_token_ids) for r in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[row, longest - len(request.prompt_token_ids) :] = 1
        generators = [torch.Generator().manual_seed(request.seed) for request in batch]
        outputs: list[list[int]] = [[] for _ in batch]
        finished: dict[int, str] = {}
        cache: Any = None
        mask = mask.to(device)
        step_ids = ids.to(device)
        while len(finished) < len(batch):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -step_ids.shape[1] :]
            with torch.inference_mode():  # not around the yield: the caller would run inside it
                result = self._model(
                    step_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                    logits_to_keep=1,
                )  # fmt: skip
            cache = result.past_key_values
            chosen = _sample(result.logits[:, -1].float().cpu(), sampling, generators)
            for row, token in enumerate(chosen):
                if row in finished:
                    continue
                outputs[row].append(token)
                reason = self._finish_reason(batch[row], outputs[row], sampling, stop)
                if reason:
                    finished[row] = reason
                    yield self._generation(batch[row], outputs[row], reason)
            step_ids = torch.tensor(chosen, device=device)[:, None]
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=1)

    def _finish_reason(
        self, request: GenerationRequest, output: list[int], sampling: SamplingOptions, stop: frozenset[int]
    ) -> str:
        if output[-1] in stop:
            return "stop"
        full = len(request.prompt_token_ids) + len(output) >= self._max_model_len
        return "length" if full or len(output) >= sampling.max_tokens else ""

    def _generation(self, request: GenerationRequest, output: list[int], reason: str) -> Generation:
        return Generation(
            request_id=request.id,
            prompt_token_ids=list(request.prompt_token_ids),
            output_token_ids=list(output),
            finish_reason=reason,
        )

    def close(self) -> None:
        """Gives the model's memory back."""
        del self._model


def _sample(logits: torch.Tensor, sampling: SamplingOptions, generators: list[torch.Generator]) -> list[int]:
    """Next token of each row. logits: [B, V]."""
    import torch

    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    probabilities, order = torch.softmax(logits / sampling.temperature, -1).sort(-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities > sampling.top_p
    probabilities = probabilities.masked_fill(outside, 0.0)
    picks = [
        torch.multinomial(row, 1, generator=generator) for row, generator in zip(probabilities, generators, strict=True)
    ]
    return order.gather(-1, torch.stack(picks))[:, 0].tolist()
