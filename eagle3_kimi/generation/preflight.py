"""Checks before a run that costs hours: control tokens, rendering, and a few canary generations."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from eagle3_kimi.chat import check_rendering, render_prompt
from eagle3_kimi.engines import GenerationRequest, SamplingOptions, TargetEngine
from eagle3_kimi.errors import TargetError
from eagle3_kimi.protocol import Reason, ReasoningProtocol

CANARY_PROMPTS = ("What is 27 + 58?", "Sort 7,3,9,1.", "Reverse 4,8,1,6.")
"""Short questions; the tiny target has learnt to answer the last two."""

_CAUSES = {
    Reason.FINISH_LENGTH: "max_tokens is too small for this target's thoughts; raise it",
    Reason.PROMPT_CLOSED_THOUGHTS: "thinking is switched off in the rendered prompt; Kimi's template listens to "
    "`thinking`, not to `enable_thinking`",
    Reason.THOUGHTS_NOT_OPENED: "the prompt does not open the thoughts: wrong chat template or wrong preset",
    Reason.UNCLOSED_THOUGHTS: "the target never closes its thoughts: wrong template, wrong revision, damaged weights",
    Reason.BLANK_REASONING: "the target closes its thoughts at once: the template's thinking variable has no effect",
    Reason.NO_END_OF_TURN: "generation stops on something else than the end of turn: stop ids of another model",
}


def check_prompt_rendering(tokenizer: Any, protocol: ReasoningProtocol) -> None:
    """Renders one prompt and refuses a template that does not open the thoughts."""
    prompt = render_prompt(tokenizer, [{"role": "user", "content": CANARY_PROMPTS[0]}], preset=protocol.preset)
    check_rendering(protocol, prompt)


def check_canaries(
    engine: TargetEngine, tokenizer: Any, protocol: ReasoningProtocol, sampling: SamplingOptions
) -> None:
    """Generates the canary prompts; at least one must come back complete.

    Raises:
        TargetError: none is complete; names the likely cause and shows an answer.
    """
    requests = deque(
        GenerationRequest(
            id=f"canary-{index}",
            prompt_token_ids=render_prompt(tokenizer, [{"role": "user", "content": text}], preset=protocol.preset),
            seed=index,
        )
        for index, text in enumerate(CANARY_PROMPTS)
    )
    reasons: Counter[Reason] = Counter()
    shown = ""
    for generation in engine.generate(requests, sampling, protocol.markers.stop_token_ids):
        reading = protocol.read(generation.prompt_token_ids, generation.output_token_ids, generation.finish_reason)
        reasons[reading.reason] += 1
        if not reading.complete:
            shown = shown or generation.error or protocol.show(generation.output_token_ids)[-300:]
    if not reasons[Reason.OK]:
        reason, _ = reasons.most_common(1)[0]
        cause = _CAUSES.get(reason, "look at the answer below")
        raise TargetError(
            f"preflight: none of {len(CANARY_PROMPTS)} canary prompts came back complete ({reason}). "
            f"Likely cause: {cause}. One answer ends: {shown!r}"
        )
