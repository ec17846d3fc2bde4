from __future__ import annotations

import random
from typing import Any

import pytest

from eagle3_kimi.captures import Fault, Repair, Verdict, judge
from eagle3_kimi.captures.damage import is_degenerate_text
from eagle3_kimi.protocol import Reason
from tests.captures.records import CALL, chat, chunk, sglang

PROSE = "The train leaves at nine, takes four hours and is late by a quarter, so it comes at a quarter past one. "

RUNAWAY = {
    "one token": "lock" * 60,
    "one character": "!" * 100,
    "words": "the the the " * 20,
    "a sentence": "Wait, let me check again. " * 8,
    "a paragraph": (PROSE + "But wait. ") * 6,
    "after some text": PROSE + "and so on " * 40,
    "before some text": "and so on " * 40 + PROSE,
    "in a long text": PROSE * 2 + "0, " * 400 + PROSE[::-1] * 30,
    "Chinese": "锁" * 80,
    "an anchor that comes twice in a period": "lock the lock the lock the lock at home, " * 10,
}
NORMAL = {
    "short": "ha ha ha ha",
    "twenty letters": "a" * 20,
    "a rule": PROSE + "-" * 80 + "\n" + PROSE,
    "a table": "| a | b |\n|---|---|\n" + "".join(f"| {i} | {i * i} |\n" for i in range(60)),
    "a refrain": (PROSE + "Row, row, row your boat.\n") * 3,
    "a list": "".join(f"{i}. item {i}\n" for i in range(100)),
    "indented code": "def f(x):\n" + "".join(f"    x{i} = x{i} + 1\n" for i in range(40)),
    "random": "".join(random.Random(0).choices("abcdefgh ", k=4000)),
}


@pytest.mark.parametrize("text", RUNAWAY.values(), ids=RUNAWAY.keys())
def test_runaway_repetition(text: str) -> None:
    assert is_degenerate_text(text)
    assert judge(chat("No.", reasoning=text))[0].reason is Reason.DEGENERATE_REASONING
    assert judge(chat(text, reasoning="Odd."))[0].reason is Reason.DEGENERATE_ANSWER


@pytest.mark.parametrize("text", NORMAL.values(), ids=NORMAL.keys())
def test_repetition_of_normal_text(text: str) -> None:
    assert not is_degenerate_text(text)
    assert judge(chat(text, reasoning="Odd."))[0].verdict is Verdict.ACCEPT


def test_degeneration_against_a_naive_reference() -> None:
    def reference(text: str) -> bool:
        shortest = max(64, min((len(text) + 1) // 2, 1024))
        for period in range(1, 41):
            run = period
            for i in range(period, len(text)):
                run = run + 1 if text[i] == text[i - period] else period
                if run >= shortest and run // period >= (16 if period < 16 else 5):
                    return True
        return False

    rng = random.Random(1)
    told = [0, 0]
    for _ in range(300):
        cycle = "".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 40)))
        run = (cycle * 200)[: rng.randint(20, 600)]
        noise = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(0, 400))) for _ in range(2)]
        text = noise[0] + run + noise[1]
        assert is_degenerate_text(text) == reference(text), text
        told[reference(text)] += 1
    assert min(told) > 50


REPLACED: dict[str, tuple[Any, dict[str, Any] | None, Any]] = {
    "in the content": (chat("\ufffdbel", reasoning="Odd."), None, Reason.REPLACEMENT_CHARACTER),
    "in the reasoning": (chat("No.", reasoning="\ufffd odd"), None, Reason.REPLACEMENT_CHARACTER),
    "in the arguments": (
        chat(
            None,
            finish="tool_calls",
            reasoning="Odd.",
            tool_calls=[{**CALL, "function": {"name": "f", "arguments": '{"a": "\ufffd"}'}}],
        ),
        None,
        Reason.REPLACEMENT_CHARACTER,
    ),
    "another prompt": (chat("\ufffd", reasoning="Odd."), {"prompt": "What is it?"}, Reason.REPLACEMENT_CHARACTER),
    "in the prompt too": (chat("\ufffd is it.", reasoning="Odd."), {"prompt": "What is \ufffd?"}, Reason.OK),
    "in the prompt's messages": (
        chat("\ufffd is it.", reasoning="Odd."),
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "\ufffd?"}]}]},
        Reason.OK,
    ),
    "in the row's prompt": ({"prompt": "\ufffd?", "content": "\ufffd is it.", "reasoning": "Odd."}, None, Reason.OK),
    "echo of the prompt": (sglang("Say hi now.Odd.</think>Hi."), {"prompt": "Say hi now."}, Fault.PROMPT_ECHOED),
    "echo of the row's prompt": (
        {"prompt": "Say hi now.", "text": "Say hi now. <think>Odd.</think>Hi."},
        None,
        Fault.PROMPT_ECHOED,
    ),
    "thoughts that begin with the question": (
        chat("Hi.", reasoning="Say hi now. Easy."),
        {"prompt": "Say hi now."},
        Reason.OK,
    ),
    "half a pair in the content": (chat("Hi \ud83d", reasoning="Odd."), None, Fault.LONE_SURROGATE),
    "half a pair in the reasoning": (chat("Hi.", reasoning="\udc4b odd"), None, Fault.LONE_SURROGATE),
    "halves in the wrong order": (chat("\udc4b\ud83d", reasoning="Odd."), None, Fault.LONE_SURROGATE),
    "half a pair in the arguments": (
        chat(
            None,
            finish="tool_calls",
            reasoning="Odd.",
            tool_calls=[{**CALL, "function": {"name": "f", "arguments": '{"a": "\ud83d"}'}}],
        ),
        None,
        Fault.LONE_SURROGATE,
    ),
    "pair over two parts": (
        chat([{"type": "text", "text": "Hi \ud83d"}, {"type": "text", "text": "\udc4b"}], reasoning="Odd."),
        None,
        Repair.SURROGATES_JOINED,
    ),
    "pair over two deltas of the reasoning": (
        [chunk(reasoning="Odd \ud83d"), chunk(reasoning="\udc4b"), chunk(content="No."), chunk(finish="stop")],
        None,
        Repair.SURROGATES_JOINED,
    ),
}


@pytest.mark.parametrize(("record", "context", "reason"), REPLACED.values(), ids=REPLACED.keys())
def test_damaged_text(record: Any, context: dict[str, Any] | None, reason: Any) -> None:
    (verdict,) = judge(record, context)
    assert verdict.reason is reason, verdict
