from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_kimi.evaluation.dialogues import Answers, Decoding, Question, ask


def build_question(*turns: str) -> Question:
    return Question(benchmark="b", messages=({"role": "user", "content": turns[0]},), follow_ups=turns[1:])


def ask_in_words(questions: Sequence[Question], contents: Mapping[str, str], longest: int = 99) -> Answers:
    """Prompts are the characters of all contents; the answer to a prompt is looked up by its last user turn."""

    def render(messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        return [ord(c) for c in "|".join(message["content"] for message in messages)]

    def decode(prompts: list[list[int]]) -> list[Decoding]:
        texts = ["".join(map(chr, prompt)).split("|")[-1] for prompt in prompts]
        return [Decoding(token_ids=tuple(map(ord, contents[t])) or (0,), tokens_per_step=(1,)) for t in texts]

    def read_content(prompt: list[int], decoding: Decoding) -> str:
        return "".join(map(chr, decoding.token_ids)).replace("\0", "")

    return ask(questions, render=render, decode=decode, read_content=read_content, max_prompt_tokens=longest)


def prompts_of(answers: Answers) -> list[str]:
    return ["".join(map(chr, prompt)) for prompt in answers.prompts]


def test_later_turns_follow_the_targets_own_answers() -> None:
    questions = [build_question("a", "b", "c"), build_question("x"), build_question("p", "q")]
    answers = ask_in_words(questions, {"a": "1", "b": "2", "c": "3", "x": "4", "p": "5", "q": "6"})
    assert prompts_of(answers) == ["a", "x", "p", "a|1|b", "p|5|q", "a|1|b|2|c"]
    assert answers.question_indices == [0, 1, 2, 0, 2, 0]
    assert (answers.too_long, answers.unanswered) == (0, 0)


def test_a_question_ends_at_a_cut_answer_or_a_long_prompt() -> None:
    questions = [build_question("a", "b"), build_question("long", "b"), build_question("p", "longer")]
    answers = ask_in_words(questions, {"a": "", "p": "5"}, longest=3)
    assert prompts_of(answers) == ["a", "p"]
    assert answers.unanswered == 1
    assert answers.too_long == 2
