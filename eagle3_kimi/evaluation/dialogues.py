"""Questions of one or several turns -> prompts. Later turns follow the target's own answers.

round 1   user                                  -> answer 1        all questions
round 2   user, answer 1, follow-up             -> answer 2        those with a second turn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_kimi.protocol import is_blank


@dataclass(frozen=True, kw_only=True)
class Question:
    """One conversation to ask."""

    benchmark: str
    """Where it comes from, for figures by benchmark."""
    category: str = ""
    """As the benchmark says: `coding`, `humanities`..."""
    messages: tuple[dict[str, Any], ...]
    """OpenAI-style turns before the first answer."""
    tools: tuple[dict[str, Any], ...] | None = None
    """Declarations, `{"type": "function", ...}`."""
    follow_ups: tuple[str, ...] = ()
    """What the user says after each answer."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Question:
        """Reads what `dataclasses.asdict` gave."""
        tuples = {name: tuple(values[name]) for name in ("messages", "follow_ups")}
        return cls(**{**values, **tuples, "tools": tuple(values["tools"]) if values["tools"] else None})


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """One decoded turn."""

    token_ids: tuple[int, ...]
    """The end of turn is the last one, unless the turn was cut."""
    tokens_per_step: tuple[int, ...]
    """Tokens that each engine step added; the first is the prefill's, which no draft precedes."""


@dataclass(kw_only=True)
class Answers:
    """Every turn that was asked, round by round."""

    prompts: list[list[int]] = field(default_factory=list)
    """Token ids of each generation prompt."""
    question_indices: list[int] = field(default_factory=list)
    """Which question each prompt belongs to."""
    decodings: list[Decoding] = field(default_factory=list)
    too_long: int = 0
    """Prompts that leave no room for an answer; the question ends there."""
    unanswered: int = 0
    """Answers that were cut or blank although a follow-up was to come; the question ends there."""


def ask(
    questions: Sequence[Question],
    *,
    render: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], list[int]],
    decode: Callable[[list[list[int]]], list[Decoding]],
    read_content: Callable[[list[int], Decoding], str],
    max_prompt_tokens: int,
) -> Answers:
    """Asks all first turns side by side, then all second ones, and so on.

    Args:
        questions: what to ask.
        render: messages and tools -> the generation prompt's ids.
        decode: prompts -> their turns, in order.
        read_content: prompt and turn -> the answer as later prompts hold it; blank where it was cut.
        max_prompt_tokens: a longer prompt is not asked.
    """
    answers = Answers()
    asked = [(index, list(question.messages)) for index, question in enumerate(questions)]
    for turn in range(1 + max((len(question.follow_ups) for question in questions), default=0)):
        rendered = [(index, messages, render(messages, questions[index].tools)) for index, messages in asked]
        fitting = [entry for entry in rendered if len(entry[2]) <= max_prompt_tokens]
        answers.too_long += len(rendered) - len(fitting)
        decodings = decode([prompt for _, _, prompt in fitting]) if fitting else []
        asked = []
        for (index, messages, prompt), decoding in zip(fitting, decodings, strict=True):
            answers.prompts.append(prompt)
            answers.question_indices.append(index)
            answers.decodings.append(decoding)
            if turn == len(questions[index].follow_ups):
                continue
            content = read_content(prompt, decoding)
            if is_blank(content):
                answers.unanswered += 1
                continue
            follow_up = {"role": "user", "content": questions[index].follow_ups[turn]}
            asked.append((index, [*messages, {"role": "assistant", "content": content}, follow_up]))
    return answers
