from __future__ import annotations

from typing import Any

import pytest

from eagle3_kimi.captures import Fault, Repair, Verdict, judge
from eagle3_kimi.protocol import PRESETS, Markers, Reason, ReasoningProtocol
from tests.captures.records import chat, sglang, vllm

# A table: 1 "Seven " 2 "is odd." 3 "No." 9 </think> 8 <|im_end|> 7 <think> 4+5 the bytes of one character
TABLE = {
    "1": "Seven ",
    "2": "is odd.",
    "3": "No.",
    "7": "<think>",
    "8": "<|im_end|>",
    "9": "</think>",
    "4": {"hex": "e5ae"},
    "5": {"hex": "a2"},
    "20": "<|tool_calls_section_begin|>",
    "21": "<|tool_call_begin|>",
    "22": "functions.f:0",
    "23": "<|tool_call_argument_begin|>",
    "24": "{}",
    "25": "<|tool_call_end|>",
    "26": "<|tool_calls_section_end|>",
}
KNOWN = {"prompt_suffix": "<think>", "think_end_id": 9, "eos_ids": [8], "token_table": TABLE}
GOOD = [1, 2, 9, 3, 8]


def with_ids(ids: Any, content: str | None = "No.", **message: Any) -> dict[str, Any]:
    record = chat(content, **message)
    record["choices"][0]["token_ids"] = ids
    return record


DECIDED: dict[str, tuple[Any, Reason | Repair]] = {
    "ids and fields agree": (with_ids(GOOD, reasoning="Seven is odd."), Reason.OK),
    "content was not split": (with_ids(GOOD, "Seven is odd.</think>No."), Repair.SPLIT_PREFILLED_THINK),
    "text cut in two": (with_ids(GOOD, "is odd.</think>No.", reasoning="Seven "), Repair.RESPLIT_FROM_TOKEN_IDS),
    "fields disagree": (
        with_ids(GOOD, reasoning="Seven is odd.", reasoning_content="Other."),
        Repair.RESPLIT_FROM_TOKEN_IDS,
    ),
    "no reasoning in the text": (with_ids(GOOD, reasoning=None), Repair.RESPLIT_FROM_TOKEN_IDS),
    "half a surrogate pair in the text": (
        with_ids(GOOD, "No.\ud83d", reasoning="Seven is odd."),
        Repair.REDECODED_FROM_TOKEN_IDS,
    ),
    "offline, tag stripped": (vllm("Seven is odd.No.", GOOD), Repair.RESPLIT_FROM_TOKEN_IDS),
    "SGLang": (
        sglang("Seven is odd.No.", finish={"type": "stop", "matched": 8}, output_ids=GOOD),
        Repair.RESPLIT_FROM_TOKEN_IDS,
    ),
    "the model repeats the opening": (with_ids([7, *GOOD], reasoning="Seven is odd."), Reason.OK),
    "row of a data set": ({"reasoning": "Seven is odd.", "content": "No.", "output_token_ids": GOOD}, Reason.OK),
}


@pytest.mark.parametrize(("record", "reason"), DECIDED.values(), ids=DECIDED.keys())
def test_readable_ids_decide(record: Any, reason: Any) -> None:
    (verdict,) = judge(record, KNOWN)
    assert (verdict.reason, verdict.reasoning, verdict.content) == (reason, "Seven is odd.", "No."), verdict
    assert verdict.token_exact
    assert verdict.output_token_ids in (GOOD, [7, *GOOD])


def test_bytes_of_one_character_are_decoded_together() -> None:
    (verdict,) = judge(with_ids([1, 9, 4, 5, 8], "\ufffd\ufffd", reasoning="Seven"), KNOWN)
    assert (verdict.reason, verdict.content) == (Repair.REDECODED_FROM_TOKEN_IDS, "客")


def test_calls_come_from_the_ids() -> None:
    (verdict,) = judge(with_ids([1, 20, 21, 22, 23, 24, 25, 26, 8], "", reasoning="Seven"), KNOWN)
    assert [call["function"] for call in verdict.tool_calls] == [{"name": "f", "arguments": "{}"}]
    assert verdict.verdict is Verdict.REPAIR


REFUSED: dict[str, tuple[list[int], Reason]] = {
    "no closing id": ([1, 2, 3, 8], Reason.UNCLOSED_THOUGHTS),
    "two closing ids": ([1, 9, 2, 9, 3, 8], Reason.MULTIPLE_THINK_BLOCKS),
    "no end of turn": ([1, 2, 9, 3], Reason.NO_END_OF_TURN),
    "goes on after the end": ([1, 9, 3, 8, 3], Reason.END_OF_TURN_INSIDE),
    "nothing before the closing id": ([9, 3, 8], Reason.BLANK_REASONING),
    "nothing after it": ([1, 2, 9, 8], Reason.BLANK_ANSWER),
    "half a character": ([1, 9, 4, 8], Reason.REPLACEMENT_CHARACTER),
    "section is not closed": ([1, 20, 21, 22, 8], Reason.UNCLOSED_TOOL_SECTION),
}


@pytest.mark.parametrize(("ids", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_good_text_does_not_save_bad_ids(ids: list[int], reason: Reason) -> None:
    (verdict,) = judge(with_ids(ids, reasoning="Seven is odd."), KNOWN)
    assert (verdict.verdict, verdict.reason) == (Verdict.REJECT, reason), verdict


THINK_END, END = 163607, 163586


def test_kimi_ids_without_a_tokenizer_are_checked_by_structure() -> None:
    (good,) = judge(with_ids([10, THINK_END, 11, END], reasoning="Odd."))
    (twice,) = judge(with_ids([10, THINK_END, 11, THINK_END, 12, END], reasoning="Odd."))
    (cut,) = judge(with_ids([10, THINK_END, 11], reasoning="Odd."))
    assert (good.verdict, good.token_exact) == (Verdict.ACCEPT, True)
    assert twice.reason is Reason.MULTIPLE_THINK_BLOCKS
    assert cut.reason is Reason.NO_END_OF_TURN


def test_ids_hold_what_the_text_lost() -> None:
    (verdict,) = judge(vllm("Odd.No.", [10, THINK_END, 11, END]))
    assert verdict.reason is Fault.TOKEN_IDS_UNREADABLE


def test_ids_of_another_family_say_nothing() -> None:
    (verdict,) = judge(with_ids([1, 2, 3], reasoning="Odd."))
    assert (verdict.verdict, verdict.token_exact) == (Verdict.ACCEPT, False)


@pytest.mark.parametrize("ids", [None, [], "12", [1.5], [None], [[1]], {"a": 1}])
def test_what_is_no_list_of_ids_is_not_read(ids: Any) -> None:
    (verdict,) = judge(with_ids(ids, reasoning="Odd."), KNOWN)
    assert (verdict.verdict, verdict.token_exact) == (Verdict.ACCEPT, False)


def test_prompt_ids_tell_whether_the_thoughts_were_open() -> None:
    record = with_ids([10, THINK_END, 11, END], reasoning="Odd.")
    opened, closed = [163588, 69702, 163601, 163606], [163588, 69702, 163601, 163606, 163607]
    assert judge({**record, "prompt_token_ids": opened})[0].verdict is Verdict.ACCEPT
    assert judge({**record, "prompt_token_ids": closed})[0].reason is Reason.PROMPT_CLOSED_THOUGHTS
    assert judge({**record, "prompt_token_ids": opened[:-1]})[0].reason is Reason.THOUGHTS_NOT_OPENED
    assert judge({**record, "prompt_token_ids": opened})[0].prompt_token_ids == opened


def test_a_protocol_reads_with_the_tokenizer_of_the_target() -> None:
    words = {1: "Odd.", 2: "No.", 5: "<think>", 6: "</think>", 7: "<|im_end|>"}
    markers = Markers(think_start=((5,),), think_end=((6,),), end_of_turn=((7,),))
    protocol = ReasoningProtocol(markers, lambda ids: "".join(words[i] for i in ids), preset=PRESETS["tiny-kimi"])
    (verdict,) = judge(vllm("lost", [1, 6, 2, 7], stop_reason=7), {"protocol": protocol})
    assert (verdict.reasoning, verdict.content, verdict.token_exact) == ("Odd.", "No.", True)


def test_ids_of_a_stream_are_joined() -> None:
    def piece(ids: list[int], finish: str | None = None, **delta: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "token_ids": ids, "finish_reason": finish}]}

    chunks = [piece([1, 2], content="Seven is odd."), piece([9, 3], content="No."), piece([8], "stop")]
    (verdict,) = judge({"chunks": chunks}, KNOWN)
    assert (verdict.reasoning, verdict.content, verdict.output_token_ids) == ("Seven is odd.", "No.", GOOD)
