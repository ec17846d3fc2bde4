"""Generated problems whose answers take several reasoning steps.

Three kinds, so that a mix of sources can be made of them: reversing a list from its end, sorting by
repeated minimum, and multiplication through a tool (a call, then an answer from its result). Every problem
carries the worked solution that the tiny target is trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

KINDS = ("reverse", "sort", "tool")

MULTIPLY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "parameters": {"type": "object"},
    },
}


@dataclass(frozen=True)
class Problem:
    """One generation to be learnt: the messages before it, then the thoughts and what follows them."""

    kind: str
    messages: list[dict[str, Any]]
    reasoning: str
    answer: str
    tools: list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def build_problem(kind: str, rng: random.Random) -> Problem:
    """One random problem of `kind`."""
    if kind == "reverse":
        return _build_reversal(rng)
    if kind == "sort":
        return _build_sorting(rng)
    return _build_tool_problem(rng)


def generate_problems(count: int, seed: int, kinds: tuple[str, ...] = KINDS) -> Iterator[Problem]:
    """`count` problems, kinds in turn; the same seed gives the same problems."""
    rng = random.Random(f"tiny-problems-{seed}")
    for index in range(count):
        yield build_problem(kinds[index % len(kinds)], rng)


def is_correct(problem: Problem, content: str, tool_calls: list[dict[str, Any]]) -> bool:
    """Whether a generated answer equals the worked one (calls by name and arguments)."""

    def key(call: dict[str, Any]) -> tuple[str, Any]:
        return call["function"]["name"], json.loads(call["function"]["arguments"])

    return content.strip() == problem.answer and list(map(key, tool_calls)) == list(map(key, problem.tool_calls))


# Every kind has one layout, with numbers of a fixed length: a digit that is needed stands at a fixed distance,
# which a toy model learns to look up within minutes. Lookup by content alone takes it hours.


def _build_reversal(rng: random.Random) -> Problem:
    digits = rng.sample(range(10), 4)
    steps = [f"The last of {','.join(map(str, digits))} is {digits[-1]}."]
    steps += [f"Before {after} stands {digit}." for digit, after in zip(digits[-2::-1], digits[:0:-1], strict=True)]
    question = f"{rng.choice(('Reverse', 'Mirror', 'Flip'))} {','.join(map(str, digits))}."
    answer = "Reversed: " + ",".join(map(str, digits[::-1]))
    return Problem("reverse", [{"role": "user", "content": question}], " ".join(steps), answer)


def _build_sorting(rng: random.Random) -> Problem:
    digits = rng.sample(range(10), 4)
    left, steps = list(digits), []
    while len(left) > 1:
        smallest = min(left)
        shown = ",".join(map(str, left))
        left.remove(smallest)
        steps.append(f"Of {shown} the smallest is {smallest}.")
    steps.append(f"The last is {left[0]}.")
    question = f"{rng.choice(('Sort', 'Order', 'Arrange'))} {','.join(map(str, digits))}."
    answer = "In order: " + ",".join(map(str, sorted(digits)))
    return Problem("sort", [{"role": "user", "content": question}], " ".join(steps), answer)


def _build_tool_problem(rng: random.Random) -> Problem:
    a, b = rng.randint(32, 99), rng.randint(4, 9)  # three digits in every product
    conversation = build_tool_conversation(a, b)
    question, call, result, answer = conversation
    if rng.random() < 0.5:
        return Problem("tool", [question], call["reasoning"], "", [MULTIPLY_TOOL], call["tool_calls"])
    return Problem("tool", [question, call, result], answer["reasoning"], answer["content"], [MULTIPLY_TOOL])


def build_tool_conversation(a: int, b: int) -> list[dict[str, Any]]:
    """The whole loop: question, call, result, answer."""
    call = {
        "id": "functions.multiply:0",
        "type": "function",
        "function": {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})},
    }
    thought = f"This is {a}*{b}, so I call the tool with {a} and {b}."
    return [
        {"role": "user", "content": f"Multiply {a}*{b}."},
        {"role": "assistant", "content": "", "reasoning": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(a * b)},
        {
            "role": "assistant",
            "content": f"The product is {a * b}.",
            "reasoning": f"The tool gave {a * b}, so I can answer.",
        },
    ]
