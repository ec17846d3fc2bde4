from __future__ import annotations

from typing import Any

import pytest

from eagle3_kimi.chat import render_answer, render_prompt
from eagle3_kimi.evaluation.dialogues import Decoding
from eagle3_kimi.evaluation.steps import Step, count_by, count_steps, label_tokens, list_steps, name_bucket
from eagle3_kimi.protocol import ReasoningProtocol, SpanKind
from eagle3_kimi.tiny.problems import Problem, generate_problems

R, A, T = SpanKind.REASONING, SpanKind.ANSWER, SpanKind.TOOL_CALL


@pytest.fixture(scope="module")
def protocol(tiny_tokenizer: Any) -> ReasoningProtocol:
    return ReasoningProtocol.from_tokenizer(tiny_tokenizer, "tiny-kimi")


@pytest.mark.parametrize("problem", list(generate_problems(6, seed=4)))
def test_labels_agree_with_the_protocols_spans(
    problem: Problem, protocol: ReasoningProtocol, tiny_tokenizer: Any
) -> None:
    prompt = render_prompt(tiny_tokenizer, problem.messages, tools=problem.tools, preset="tiny-kimi")
    answer = {"reasoning": problem.reasoning, "content": problem.answer, "tool_calls": problem.tool_calls}
    output = render_answer(tiny_tokenizer, answer, preset="tiny-kimi")
    kinds = label_tokens(protocol, prompt, output)
    assert len(kinds) == len(output)
    reading = protocol.read(prompt, output, "stop")
    assert reading.complete
    for span in reading.spans:
        assert set(kinds[span.start : span.end]) == {span.kind}
    ids = protocol.markers
    for name, kind in (("think_end", R), ("tool_section_start", T), ("tool_section_end", T)):
        for index in (i for i, token in enumerate(output) if (token,) in getattr(ids, name)):
            assert kinds[index] is kind


def test_labels_of_turns_that_are_not_complete(protocol: ReasoningProtocol, tiny_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is 2 plus 2?"}]
    opened = render_prompt(tiny_tokenizer, messages, preset="tiny-kimi")
    closed = render_prompt(tiny_tokenizer, messages, thinking=False, preset="tiny-kimi")
    ((think_end,),) = protocol.markers.think_end
    assert label_tokens(protocol, opened, [5, 6]) == [R, R]  # cut inside the thoughts
    assert label_tokens(protocol, opened, [5, think_end, 6]) == [R, R, A]
    assert label_tokens(protocol, closed, [5, 6]) == [A, A]  # thinking off
    assert label_tokens(protocol, closed, []) == []


def test_a_step_belongs_to_the_span_of_its_first_token(protocol: ReasoningProtocol, tiny_tokenizer: Any) -> None:
    prompt = render_prompt(tiny_tokenizer, [{"role": "user", "content": "Hi"}], preset="tiny-kimi")
    ((end,),), stop = protocol.markers.think_end, protocol.markers.stop_token_ids[0]
    #         prefill | r r r | r </think> a | a a | <|im_end|>
    decoding = Decoding(token_ids=(5, 5, 5, 5, 5, end, 6, 6, 6, stop), tokens_per_step=(1, 3, 3, 2, 1))
    steps = list_steps(protocol, prompt, decoding)
    assert [(step.kind, step.context - len(prompt), step.tokens) for step in steps] == [
        (R, 1, 3),
        (R, 4, 3),
        (A, 7, 2),
        (A, 9, 1),
    ]
    spans = count_by(steps, lambda step: str(step.kind), 3)
    assert (spans["reasoning"].acceptance_length, spans["answer"].acceptance_length) == (3.0, 1.5)


def test_counts_are_joint_and_include_the_bonus_token() -> None:
    steps = [Step(kind=R, context=0, tokens=tokens) for tokens in (1, 4, 2, 3)]
    counts = count_steps(steps, 3)
    assert (counts.steps, counts.tokens, counts.accepted) == (4, 10, (3, 2, 1))
    assert counts.acceptance_length == 2.5 == 1 + sum(counts.acceptance_per_position)
    assert count_steps([], 2).acceptance_per_position == (0.0, 0.0)


def test_buckets_are_powers_of_two() -> None:
    names = {context: name_bucket(context) for context in (0, 255, 256, 511, 512, 8191, 8192)}
    assert names == {
        0: "0-255",
        255: "0-255",
        256: "256-511",
        511: "256-511",
        512: "512-1023",
        8191: "4096-8191",
        8192: "8192-16383",
    }
