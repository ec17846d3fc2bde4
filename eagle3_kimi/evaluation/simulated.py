"""Greedy speculative decoding under transformers: the chains a serving engine would run, without its speed.

target forward over [last token, p_1 .. p_k]  ->  choices c_0 .. c_k
accepted = longest prefix with p_{i+1} == c_i;  the turn grows by c_0 .. c_accepted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.engines.transformers import load_model
from eagle3_kimi.errors import UsageError
from eagle3_kimi.evaluation.acceptance import AcceptanceRequest
from eagle3_kimi.evaluation.dialogues import Decoding
from eagle3_kimi.evaluation.drafting import DraftChain, load_draft_model
from eagle3_kimi.target import Target

Verify = Callable[[list[int]], tuple[list[int], Tensor]]
"""New tokens -> the target's choice after each, and its aux hidden states there [M, A*H]."""


class SimulatedDecoder:
    """The target under transformers, one prompt after the other, with the request's drafter or without.

    Raises:
        UsageError: the temperature is not 0, or the drafter takes the state after the last layer.
    """

    name = "transformers (simulated)"

    def __init__(self, target: Target, request: AcceptanceRequest) -> None:
        import transformers

        _check_greedy(request)
        self._model = load_model(target, request.dtype)
        self._drafter = None
        if request.drafter is not None:
            dtype = getattr(torch, request.dtype) if request.dtype != "auto" else self._model.dtype
            self._drafter = load_draft_model(Path(request.drafter), target, dtype=dtype)
            self._drafter.embed_tokens = self._drafter.embed_tokens.to(self._model.device)
            self._drafter.to(self._model.device)
            if self._drafter.config.aux_layer_ids[-1] >= target.num_layers:
                raise UsageError(
                    f"aux layer id {self._drafter.config.aux_layer_ids[-1]} is the state after the last layer, which "
                    "transformers shows after the final norm only; measure this drafter with vLLM"
                )
        self._stop = frozenset(request.find_stop_ids(target))
        self._accepted_counts: list[int] = []
        self._num_speculative_tokens = 0
        self.version = transformers.__version__
        self.device = self._model.device.type

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], request: AcceptanceRequest) -> list[Decoding]:
        """See `worker.Decoder`."""
        _check_greedy(request)
        self._num_speculative_tokens = request.num_speculative_tokens if self._drafter is not None else 0
        return [self._decode_one(tuple(prompt), request) for prompt in prompts]

    def _decode_one(self, prompt: tuple[int, ...], request: AcceptanceRequest) -> Decoding:
        aux_layer_ids = self._drafter.config.aux_layer_ids if self._drafter is not None else ()
        output, accepted = decode(
            prompt,
            _build_verifier(self._model, aux_layer_ids),
            DraftChain(self._drafter) if self._drafter is not None else None,
            num_speculative_tokens=self._num_speculative_tokens,
            max_tokens=min(request.max_tokens, request.max_model_len - len(prompt)),
            stop=self._stop,
        )
        self._accepted_counts += accepted
        steps = [1, *(count + 1 for count in accepted)] if self._drafter is not None else [1] * len(output)
        steps[-1] -= sum(steps) - len(output)  # what the last chain proposed behind the end
        return Decoding(token_ids=tuple(output), tokens_per_step=tuple(steps))

    def take_counters(self) -> tuple[int, tuple[int, ...]]:
        """See `worker.Decoder`."""
        counts, self._accepted_counts = self._accepted_counts, []
        return len(counts), tuple(sum(count > i for count in counts) for i in range(self._num_speculative_tokens))

    @torch.inference_mode()
    def find_best_two(self, texts: Sequence[Sequence[int]]) -> list[tuple[tuple[int, int], float]]:
        """See `worker.Decoder`."""
        found = []
        for text in texts:
            ids = torch.tensor([list(text)], device=self._model.device)
            logits, tokens = self._model(ids, logits_to_keep=1).logits[0, -1].float().topk(2)
            found.append(((int(tokens[0]), int(tokens[1])), float(logits[0] - logits[1])))
        return found

    def close(self) -> None:
        """Nothing outlives the process."""


def _check_greedy(request: AcceptanceRequest) -> None:
    if request.temperature:
        raise UsageError(f"the simulation is greedy: temperature must be 0, not {request.temperature}; use vLLM")


def decode(
    prompt: tuple[int, ...],
    verify: Verify,
    chain: DraftChain | None,
    *,
    num_speculative_tokens: int,
    max_tokens: int,
    stop: frozenset[int],
) -> tuple[list[int], list[int]]:
    """One turn: its tokens, and the accepted proposals of each chain.

    Args:
        prompt: token ids.
        verify: the target, with a cache that holds what it was given so far.
        chain: the drafter's state for this turn; None decodes plainly.
        num_speculative_tokens: proposals a chain.
        max_tokens: the turn is cut there.
        stop: ids that end a turn.
    """
    choices, aux = verify(list(prompt))
    output, new, following = choices[-1:], choices[-1:], [*prompt[1:], choices[-1]]
    accepted_counts: list[int] = []
    while len(output) < max_tokens and not stop.intersection(new):
        proposals: list[int] = []
        if chain is not None:
            chain.read(aux, torch.tensor(following, device=aux.device))
            proposals = chain.propose(num_speculative_tokens)
        choices, aux = verify([output[-1], *proposals])
        accepted = _count_accepted(proposals, choices)
        if chain is not None:
            accepted_counts.append(accepted)
        new = following = choices[: accepted + 1]
        aux = aux[: accepted + 1]
        output = output + new
    ends = [index for index, token in enumerate(output) if token in stop]
    return output[: min(max_tokens, ends[0] + 1 if ends else max_tokens)], accepted_counts


def _count_accepted(proposals: list[int], choices: list[int]) -> int:
    for index, (proposal, choice) in enumerate(zip(proposals, choices, strict=False)):
        if proposal != choice:
            return index
    return len(proposals)


def _build_verifier(model: Any, aux_layer_ids: tuple[int, ...]) -> Verify:
    """The target on one sequence; refused proposals are cut from its cache before the next tokens go in."""
    from transformers import DynamicCache

    cache = DynamicCache()
    started = False

    def verify(tokens: list[int]) -> tuple[list[int], Tensor]:
        nonlocal started
        result = model(
            torch.tensor([tokens], device=model.device),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=bool(aux_layer_ids),
        )
        choices: list[int] = result.logits[0].argmax(-1).tolist()
        refused = len(tokens) - 1 - _count_accepted(tokens[1:], choices) if started else 0
        if refused:
            cache.crop(-refused)
        started = True
        states = [result.hidden_states[layer_id][0] for layer_id in aux_layer_ids]
        return choices, torch.cat(states, dim=-1) if states else result.logits[0, :, :0]

    return verify
