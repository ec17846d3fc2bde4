from __future__ import annotations

from typing import Any

import pytest

from eagle3_kimi.captures import Fault, Repair, Verdict, judge
from eagle3_kimi.captures.markdown import find_closed_code
from eagle3_kimi.protocol import Reason
from tests.captures.records import THINKING, chat, sglang

FENCE = "```xml\n<think>draft</think>\n```"
NOT_OPENED = {"prompt_suffix": "<|im_assistant|>assistant<|im_middle|>", "thinking": True}

SPLIT: dict[str, tuple[Any, Repair, str, str]] = {
    "whole block": (chat("<think>Odd.</think>No."), Repair.SPLIT_INLINE_THINK, "Odd.", "No."),
    "byte order mark before it": (chat("\ufeff<think>Odd.</think>No."), Repair.SPLIT_INLINE_THINK, "Odd.", "No."),
    "closing tag only": (chat("Odd.</think>No."), Repair.SPLIT_PREFILLED_THINK, "Odd.", "No."),
    "empty reasoning field beside it": (
        chat("Odd.</think>No.", reasoning=""),
        Repair.SPLIT_PREFILLED_THINK,
        "Odd.",
        "No.",
    ),
    "text part": (chat([{"type": "text", "text": "Odd.</think>No."}]), Repair.SPLIT_PREFILLED_THINK, "Odd.", "No."),
    "literal tag in inline code of the thoughts": (
        chat("They ask about `</think>`.</think>It ends thoughts."),
        Repair.SPLIT_PREFILLED_THINK,
        "They ask about `</think>`.",
        "It ends thoughts.",
    ),
    "double back-ticks": (
        chat("Say ``a `</think>` b``.</think>Done."),
        Repair.SPLIT_PREFILLED_THINK,
        "Say ``a `</think>` b``.",
        "Done.",
    ),
    "tilde fence": (
        chat("Show:\n~~~\n</think>\n~~~\nso.</think>Done."),
        Repair.SPLIT_PREFILLED_THINK,
        "Show:\n~~~\n</think>\n~~~\nso.",
        "Done.",
    ),
    "closed fences on both sides": (
        chat(f"Plan:\n{FENCE}\ndone.</think>Use:\n{FENCE}"),
        Repair.SPLIT_PREFILLED_THINK,
        f"Plan:\n{FENCE}\ndone.",
        f"Use:\n{FENCE}",
    ),
    "open back-tick in another paragraph": (
        chat("The ` key.\n\nFine.</think>Press the ` key."),
        Repair.SPLIT_PREFILLED_THINK,
        "The ` key.\n\nFine.",
        "Press the ` key.",
    ),
    "open fence in the answer": (
        chat("Odd.</think>```python\nx = 1"),
        Repair.SPLIT_PREFILLED_THINK,
        "Odd.",
        "```python\nx = 1",
    ),
    "opening tag left in the field": (chat("No.", reasoning="<think>Odd."), Repair.STRIPPED_THINK_TAGS, "Odd.", "No."),
    "both tags left in the field": (
        chat("No.", reasoning="<think>\nOdd.\n</think>\n"),
        Repair.STRIPPED_THINK_TAGS,
        "Odd.",
        "No.",
    ),
    "closing tag left in the field": (chat("No.", reasoning="Odd.</think>"), Repair.STRIPPED_THINK_TAGS, "Odd.", "No."),
    "closing tag left in the content": (
        chat("\n</think>No.", reasoning="Odd."),
        Repair.STRIPPED_THINK_TAGS,
        "Odd.",
        "No.",
    ),
    "closing tag cut in two": (chat("nk>No.", reasoning="Odd.</thi"), Repair.STRIPPED_THINK_TAGS, "Odd.", "No."),
    "thoughts in the field and in the content": (
        chat("<think>Odd.</think>No.", reasoning="Odd."),
        Repair.STRIPPED_THINK_TAGS,
        "Odd.",
        "No.",
    ),
    "the field has only the opening tag": (
        chat("Odd.</think>No.", reasoning="<think>"),
        Repair.SPLIT_PREFILLED_THINK,
        "Odd.",
        "No.",
    ),
    "the field holds everything": (
        chat(None, reasoning="Odd.</think>No."),
        Repair.SPLIT_REASONING_FIELD,
        "Odd.",
        "No.",
    ),
    "end of turn left in raw text": (
        sglang("Odd.</think>No.<|im_end|>\n"),
        Repair.SPLIT_PREFILLED_THINK,
        "Odd.",
        "No.",
    ),
    "[EOS] left in raw text": (sglang("Odd.</think>No.[EOS]"), Repair.SPLIT_PREFILLED_THINK, "Odd.", "No."),
    "end of turn left in the content": (
        chat("No.<|im_end|>", reasoning="Odd."),
        Repair.STRIPPED_END_OF_TURN,
        "Odd.",
        "No.",
    ),
}


@pytest.mark.parametrize(("record", "repair", "reasoning", "content"), SPLIT.values(), ids=SPLIT.keys())
def test_one_reading_is_split(record: Any, repair: Repair, reasoning: str, content: str) -> None:
    (verdict,) = judge(record, THINKING)
    assert (verdict.verdict, verdict.reason) == (Verdict.REPAIR, repair), verdict
    assert (verdict.reasoning, verdict.content) == (reasoning, content)


LITERAL = {
    "fence": f"Use:\n{FENCE}\nand answer.",
    "inline": "The tag `</think>` ends thoughts.",
    "control strings": "Kimi ends turns with `<|im_end|>`, and calls tools after `<|tool_calls_section_begin|>`.",
    "other families' tags": "Write <thinking> here, or [THINK].",
    "[PAD] in the text": "BERT pads with [PAD] and [EOS] tokens.",
}


@pytest.mark.parametrize("content", LITERAL.values(), ids=LITERAL.keys())
def test_tags_in_closed_code_are_content(content: str) -> None:
    (verdict,) = judge(chat(content, reasoning="Give an example."))
    assert (verdict.verdict, verdict.content) == (Verdict.ACCEPT, content), verdict


REFUSED: dict[str, tuple[Any, Fault | Reason]] = {
    "text before the block": (chat("Sure. <think>Odd.</think>No."), Reason.MULTIPLE_THINK_BLOCKS),
    "two blocks": (chat("<think>A.</think><think>B.</think>No."), Reason.MULTIPLE_THINK_BLOCKS),
    "two openings": (chat("<think><think>A.</think>No."), Reason.MULTIPLE_THINK_BLOCKS),
    "two openings in the field": (chat("No.", reasoning="<think><think>A."), Fault.RESIDUAL_THINK_MARKER),
    "two closings": (chat("A.</think>B.</think>No."), Reason.MULTIPLE_THINK_BLOCKS),
    "block after the answer": (chat("No.<think>Check.</think>", reasoning="Odd."), Fault.RESIDUAL_THINK_MARKER),
    "opening in the answer": (chat("No. <think> is a tag.", reasoning="Odd."), Fault.RESIDUAL_THINK_MARKER),
    "thoughts cut in two": (chat(" the rest.</think>No.", reasoning="First half, then"), Fault.AMBIGUOUS_SPLIT),
    "empty block in the content": (chat("<think></think>No.", reasoning="Odd."), Fault.RESIDUAL_THINK_MARKER),
    "closing inside the field": (chat("No.", reasoning="A.</think>B."), Fault.RESIDUAL_THINK_MARKER),
    "half a tag left": (chat("No.", reasoning="Odd.</thin"), Fault.RESIDUAL_THINK_MARKER),
    "other half left": (chat("/think>No.", reasoning="Odd."), Fault.RESIDUAL_THINK_MARKER),
    "only a tag in code": (chat("Use `</think>` to close the thoughts."), Fault.MISSING_REASONING),
    "only tags in a fence": (chat(f"Use:\n{FENCE}\nDone."), Fault.MISSING_REASONING),
    "code around the only tag": (chat("Try ```\nx</think>y\n``` now"), Fault.MISSING_REASONING),
    "empty block": (chat("<think></think>Yes."), Reason.BLANK_REASONING),
    "closing first": (chat("</think>Yes."), Reason.BLANK_REASONING),
    "nothing after the closing": (chat("Odd.</think>\n"), Reason.BLANK_ANSWER),
    "opening without closing": (chat("<think>Odd. No."), Reason.UNCLOSED_THOUGHTS),
    "all in the field without closing": (chat(None, reasoning="Odd. So no."), Reason.BLANK_ANSWER),
    "turn goes on after its end": (sglang("Odd.</think>No.<|im_end|>Next."), Reason.END_OF_TURN_INSIDE),
    "two ends": (sglang("Odd.</think>No.<|im_end|><|im_end|>"), Reason.END_OF_TURN_INSIDE),
    "user's turn made up": (
        chat("No.<|im_user|>user<|im_middle|>And 8?", reasoning="Odd."),
        Reason.FOREIGN_CONTROL_TOKEN,
    ),
    "control token in the thoughts": (sglang("Odd.<|im_end|></think>No."), Reason.END_OF_TURN_INSIDE),
}


@pytest.mark.parametrize(("record", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_two_readings_or_none_are_refused(record: Any, reason: Fault | Reason) -> None:
    (verdict,) = judge(record, THINKING)
    assert (verdict.verdict, verdict.reason) == (Verdict.REJECT, reason), verdict


CONTEXTS: dict[str, tuple[dict[str, Any] | None, str | Fault | Reason]] = {
    "nothing known: Kimi, thinking on": (None, "repair"),
    "prompt opened, with a newline": ({"prompt_suffix": "<think>\n"}, "repair"),
    "prompt decides over the flag": ({"prompt_suffix": "<think>", "thinking": False}, "repair"),
    "enable_thinking is not Kimi's": ({"request_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "repair"),
    "extra_body of a raw body reaches nothing": (
        {"request_body": {"extra_body": {"chat_template_kwargs": {"thinking": False}}}},
        "repair",
    ),
    "prompt did not open": (NOT_OPENED, Reason.THOUGHTS_NOT_OPENED),
    "prompt closed": ({"prompt_suffix": "<think></think>"}, Reason.PROMPT_CLOSED_THOUGHTS),
    "prompt closed, other template": ({"prompt_suffix": "<think>\n\n</think>\n\n"}, Reason.PROMPT_CLOSED_THOUGHTS),
    "template variable off": (
        {"request_body": {"chat_template_kwargs": {"thinking": False}}},
        Fault.THINKING_DISABLED,
    ),
    "official API's switch": ({"request_body": {"thinking": {"type": "disabled"}}}, Fault.THINKING_DISABLED),
    "known to be off": ({"thinking": False}, Fault.THINKING_DISABLED),
}


@pytest.mark.parametrize(("context", "expected"), CONTEXTS.values(), ids=CONTEXTS.keys())
def test_the_rendered_prompt_decides(context: dict[str, Any] | None, expected: Any) -> None:
    (verdict,) = judge(chat("Odd.</think>No."), context)
    assert expected in (verdict.verdict, verdict.reason), verdict


def test_prompt_of_the_record_is_looked_at() -> None:
    outputs = [{"index": 0, "text": "Odd.</think>No.", "finish_reason": "stop"}]
    (opened,) = judge({"prompt": "<|im_assistant|>assistant<|im_middle|><think>", "outputs": outputs})
    (closed,) = judge({"prompt": "<|im_assistant|>assistant<|im_middle|><think></think>", "outputs": outputs})
    (absent,) = judge(
        {"prompt": "<think>x</think>A.<|im_end|><|im_assistant|>assistant<|im_middle|>", "outputs": outputs}
    )
    assert opened.verdict is Verdict.REPAIR
    assert closed.reason is Reason.PROMPT_CLOSED_THOUGHTS
    assert absent.reason is Reason.THOUGHTS_NOT_OPENED


def test_other_tags_of_a_profile() -> None:
    context = {"think_tags": ["◁think▷", "◁/think▷"], "prompt_suffix": "◁think▷"}
    (verdict,) = judge(chat("Odd.◁/think▷No. </think> is text here."), context)
    assert (verdict.reasoning, verdict.content) == ("Odd.", "No. </think> is text here.")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no code", []),
        ("a `b` c", ["`b`"]),
        ("a `` b ` c `` d", ["`` b ` c ``"]),
        ("a ` b", []),
        ("a ` b\n\nc ` d", []),
        ("```\na\n```", ["```\na\n```"]),
        ("```py\na `b`", ["`b`"]),  # an unclosed fence hides nothing
        ("mid ```py\na\n``` end", ["```py\na\n```"]),
        ("~~~\na\n~~~\nb", ["~~~\na\n~~~"]),
        ("a ~~~ b ~~~", []),
        ("```py\na\n```js\nb\n```", ["```py\na\n```js\nb\n```"]),  # a fence with an info string only opens
    ],
)
def test_closed_code(text: str, code: list[str]) -> None:
    assert [text[start:end] for start, end in find_closed_code(text)] == code
