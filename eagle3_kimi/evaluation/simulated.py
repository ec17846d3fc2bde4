"""Greedy speculative decoding under transformers: the chains a serving engine would run, without its speed.

target forward over [last token, p_1 .. p_k]  ->  choices c_0 .. c_k
accepted = longest prefix with p_{i+1} == c_i;  the turn grows by c_0 .. c_accepted
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.engines.transformers import load_model
from eagle3_kimi.errors import UsageError
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, AcceptanceRequest
from eagle3_kimi.evaluation.drafting import DraftChain, load_draft_model
from eagle3_kimi.target import Target

Verify = Callable[[list[int]], tuple[list[int], Tensor]]
"""New tokens -> the target's choice after each, and its aux hidden states there [M, A*H]."""


@torch.inference_mode()
def simulate(target: Target, request: AcceptanceRequest) -> AcceptanceReport:
    """Decodes the prompts one by one and counts what was accepted.

    Raises:
        UsageError: the temperature is not 0, or the drafter takes the state after the last layer.
    """
    import transformers

    if request.temperature:
        raise UsageError(f"the simulation is greedy: temperature must be 0, not {request.temperature}; use vLLM")
    model = load_model(target, request.dtype)
    drafter = None
    if request.drafter is not None:
        dtype = getattr(torch, request.dtype) if request.dtype != "auto" else model.dtype
        drafter = load_draft_model(Path(request.drafter), target, dtype=dtype)
        drafter.embed_tokens = drafter.embed_tokens.to(model.device)
        drafter.to(model.device)
        if drafter.config.aux_layer_ids[-1] >= target.num_layers:
            raise UsageError(
                f"aux layer id {drafter.config.aux_layer_ids[-1]} is the state after the last layer, which "
                "transformers shows after the final norm only; measure this drafter with vLLM"
            )
    stop = frozenset(target.load_protocol(target.load_tokenizer()).markers.stop_token_ids)
    length = request.num_speculative_tokens if drafter is not None else 0
    accepted_counts, outputs = [], []
    started = time.perf_counter()
    for prompt in request.prompts:
        chain = DraftChain(drafter) if drafter is not None else None
        verify = _build_verifier(model, drafter.config.aux_layer_ids if drafter is not None else ())
        most = min(request.max_tokens, request.max_model_len - len(prompt))
        output, accepted = decode(prompt, verify, chain, num_speculative_tokens=length, max_tokens=most, stop=stop)
        outputs.append(tuple(output))
        accepted_counts += accepted
    return AcceptanceReport(
        engine="transformers (simulated)",
        engine_version=transformers.__version__,
        device=model.device.type,
        num_speculative_tokens=length,
        num_drafts=len(accepted_counts),
        accepted_per_position=tuple(sum(count > i for count in accepted_counts) for i in range(length)),
        output_token_ids=tuple(outputs),
        seconds=time.perf_counter() - started,
    )


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
