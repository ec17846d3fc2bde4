"""Generated problems whose answers take several reasoning steps.

Three kinds, so that a mix of sources can be made of them: column addition, sorting by repeated
minimum, and multiplication through a tool (a call, then an answer from its result). Every problem
carries the worked solution that the tiny target is trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

KINDS = ("add", "sort", "tool")

MULTIPLY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
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
    if kind == "add":
        return _build_addition(rng)
    if kind == "sort":
        return _build_sorting(rng)
    if kind == "echo":
        return _build_echo(rng)
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


def _build_addition(rng: random.Random) -> Problem:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = ones // 10
    carried = f" plus {carry}" if carry else ""
    reasoning = (
        f"Add the ones of {a} and {b}: {a % 10} plus {b % 10} is {ones}, write {ones % 10} and carry {carry}. "
        f"Add the tens: {a // 10} plus {b // 10}{carried} is {tens + carry}. The sum is {a + b}."
    )
    question = rng.choice((f"What is {a} + {b}?", f"Add {a} and {b}.", f"How much is {a} plus {b}?"))
    return Problem("add", [{"role": "user", "content": question}], reasoning, f"{a} + {b} = {a + b}")


def _build_sorting(rng: random.Random) -> Problem:
    digits = rng.sample(range(10), rng.randint(3, 5))
    text = " ".join(map(str, digits))
    left, steps = list(digits), [f"Take the smallest of {text} each time."]
    while len(left) > 1:
        smallest = min(left)
        left.remove(smallest)
        steps.append(f"It is {smallest}, left {' '.join(map(str, left))}.")
    steps.append(f"The last is {left[0]}.")
    question = rng.choice((f"Sort these numbers: {text}", f"Put {text} in order.", f"Order from low to high: {text}"))
    answer = "In order: " + " ".join(map(str, sorted(digits)))
    return Problem("sort", [{"role": "user", "content": question}], " ".join(steps), answer)


def _build_echo(rng: random.Random) -> Problem:
    """Only for training: copying, the skill that all kinds need, in its densest form."""
    text = " ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(4, 12)))
    return Problem("echo", [{"role": "user", "content": f"Repeat: {text}"}], f"I repeat {text}.", text)


def _build_tool_problem(rng: random.Random) -> Problem:
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": rng.choice((f"Multiply {a} by {b}.", f"What is {a} times {b}?"))}
    ]
    call = {
        "id": "functions.multiply:0",
        "type": "function",
        "function": {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})},
    }
    thought = f"I want {a} times {b}, so I call multiply with {a} and {b}."
    if rng.random() < 0.5:
        return Problem("tool", messages, thought, "", [MULTIPLY_TOOL], [call])
    messages.append({"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(a * b)})
    reasoning = f"The tool gave {a * b}, that is {a} times {b}."
    return Problem("tool", messages, reasoning, f"{a} x {b} = {a * b}", [MULTIPLY_TOOL])
