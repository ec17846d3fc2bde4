"""What surrounds an engine, with an engine that answers from a table."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from eagle3_kimi.chat import render_answer, render_prompt
from eagle3_kimi.errors import TargetError
from eagle3_kimi.evaluation.acceptance import AcceptanceRequest
from eagle3_kimi.evaluation.dialogues import Decoding, Question
from eagle3_kimi.evaluation.worker import measure
from eagle3_kimi.protocol import ReasoningProtocol


@dataclass
class TableDecoder:
    """Answers every prompt with the next of `outputs`; drafts one chain a turn, and accepts its first proposal."""

    outputs: list[tuple[int, ...]]
    name: str = "table"
    version: str = "1"
    device: str = "paper"
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    drafts: int = 5
    """Of the warm-up, to be forgotten."""

    def decode(self, prompts: Sequence[Sequence[int]], request: AcceptanceRequest) -> list[Decoding]:
        self.prompts += map(list, prompts)
        self.drafts += len(prompts)
        ids = [self.outputs.pop(0) for _ in prompts]
        return [Decoding(token_ids=output, tokens_per_step=(1, len(output) - 1)) for output in ids]

    def take_counters(self) -> tuple[int, tuple[int, ...]]:
        drafts, self.drafts = self.drafts, 0
        return drafts, (drafts, 0)

    def find_best_two(self, texts: Sequence[Sequence[int]]) -> list[tuple[tuple[int, int], float]]:
        self.texts += map(list, texts)
        return [((1, 2), 0.25) for _ in texts]

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def protocol(tiny_tokenizer: Any) -> ReasoningProtocol:
    return ReasoningProtocol.from_tokenizer(tiny_tokenizer, "tiny-kimi")


def test_the_first_difference_is_looked_up(tiny_tokenizer: Any, protocol: ReasoningProtocol) -> None:
    request = AcceptanceRequest(
        target="tiny",
        prompts=((90, 91), (92,), (93,)),
        reference=((5, 6, 7), (5, 6), (5, 6, 7)),
    )
    decoder = TableDecoder([(5, 6, 7), (5, 8), (5, 6)])
    report = measure(decoder, request, tiny_tokenizer, protocol)
    (divergence,) = report.divergences  # the third was cut, and says nothing else
    assert (divergence.prompt, divergence.position) == (1, 1)
    assert (divergence.plain_token, divergence.drafted_token) == (6, 8)
    assert (divergence.best_two, divergence.logit_gap) == ((1, 2), 0.25)
    assert decoder.texts == [[92, 5]]
    assert (report.num_drafts, report.accepted_per_position) == (3, (3, 0))
    assert report.prompt_token_ids == request.prompts
    assert report.tokens_per_step == ((1, 2), (1, 1), (1, 1))


def test_a_second_turn_sees_the_answer_without_its_reasoning(tiny_tokenizer: Any, protocol: ReasoningProtocol) -> None:
    first = [{"role": "user", "content": "Sort 3,1."}]
    answer = {"reasoning": "1 is the smallest", "content": "1,3"}
    output = tuple(render_answer(tiny_tokenizer, answer, preset="tiny-kimi"))
    request = AcceptanceRequest(
        target="tiny", questions=(Question(benchmark="b", messages=tuple(first), follow_ups=("Sort 4,2.",)),)
    )
    decoder = TableDecoder([output, output[:-1]])
    report = measure(decoder, request, tiny_tokenizer, protocol)
    second = [*first, {"role": "assistant", "content": "1,3"}, {"role": "user", "content": "Sort 4,2."}]
    expected = [render_prompt(tiny_tokenizer, messages, preset="tiny-kimi") for messages in (first, second)]
    assert decoder.prompts == expected
    assert report.question_indices == (0, 0)


def test_a_cut_answer_has_no_second_turn(tiny_tokenizer: Any, protocol: ReasoningProtocol) -> None:
    question = Question(benchmark="b", messages=({"role": "user", "content": "Sort 3,1."},), follow_ups=("And?",))
    request = AcceptanceRequest(target="tiny", questions=(question,))
    report = measure(TableDecoder([(5, 6, 7)]), request, tiny_tokenizer, protocol)
    assert (len(report.output_token_ids), report.unanswered) == (1, 1)


def test_thinking_that_cannot_be_switched_off_is_refused(tiny_tokenizer: Any, protocol: ReasoningProtocol) -> None:
    stubborn = copy.deepcopy(tiny_tokenizer)
    stubborn.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>"
    question = Question(benchmark="b", messages=({"role": "user", "content": "Sort 3,1."},))
    request = AcceptanceRequest(target="tiny", questions=(question,), thinking=False)
    with pytest.raises(TargetError, match="its thinking cannot be switched off; measure with thinking on"):
        measure(TableDecoder([(5,)]), request, stubborn, protocol)
