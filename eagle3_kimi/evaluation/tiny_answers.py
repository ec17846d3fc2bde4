"""How well the tiny target reasons: the share of its greedy answers that are complete, and that are right."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.engines import GenerationRequest, SamplingOptions, TargetEngine
from eagle3_kimi.target import Target
from eagle3_kimi.tiny.problems import generate_problems, is_correct

HELD_OUT_SEED = 1_000_003
"""Far from the seeds that training and the demo's prompts use."""


@dataclass(frozen=True, kw_only=True)
class AnswerReport:
    """Counts over held-out problems of every kind."""

    problems: int
    complete: int
    correct: int


def measure_answers(target: Target, engine: TargetEngine, count: int = 120) -> AnswerReport:
    """Asks `count` held-out problems, greedily."""
    tokenizer = target.load_tokenizer()
    protocol = target.load_protocol(tokenizer)
    problems = list(generate_problems(count, HELD_OUT_SEED))
    requests = deque(
        GenerationRequest(
            id=str(index),
            prompt_token_ids=render_prompt(tokenizer, p.messages, tools=p.tools, preset=protocol.preset),
            seed=0,
        )
        for index, p in enumerate(problems)
    )
    complete = correct = 0
    sampling = SamplingOptions(temperature=0.0, max_tokens=256)
    for generation in engine.generate(requests, sampling, protocol.markers.stop_token_ids):
        reading = protocol.read(generation.prompt_token_ids, generation.output_token_ids, generation.finish_reason)
        calls = [call.as_openai() for call in reading.tool_calls]
        complete += reading.complete
        correct += reading.complete and is_correct(problems[int(generation.request_id)], reading.content, calls)
    return AnswerReport(problems=count, complete=complete, correct=correct)
