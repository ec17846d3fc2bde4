from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_kimi.errors import TargetError
from eagle3_kimi.protocol import (
    PRESETS,
    ProtocolPreset,
    Reason,
    ReasoningProtocol,
    Span,
    SpanKind,
    ToolCall,
    is_blank,
)
from tests.kimi_tokenizer import KimiTokenizer
from tests.toy_protocol import (
    ARGS,
    BLANK,
    BROKEN,
    CALL,
    CALL_END,
    END,
    END_THINK,
    LIST,
    NAME,
    OBJECT,
    PROMPT,
    SECTION,
    SECTION_END,
    TEXTS,
    THINK,
    USER,
    VOCAB_SIZE,
    WORD,
    toy_protocol,
)

ADD = [CALL, NAME, ARGS, OBJECT, CALL_END]
LONG = list(range(20, 60))  # forty different words

# What each reason looks like: output ids, and what differs from a stop after a prompt that opened the thoughts.
TURNS: dict[str, tuple[list[int], dict]] = {
    "ok answer": ([WORD, END_THINK, WORD, END], {}),
    "ok repeated start": ([THINK, WORD, END_THINK, WORD, END], {}),
    "ok repeated start after a blank": ([BLANK, THINK, WORD, END_THINK, WORD, END], {}),
    "ok opened by the model": ([THINK, WORD, END_THINK, WORD, END], {"prompt": [USER, WORD, END]}),
    "ok tools close the thoughts": ([WORD, SECTION, *ADD, SECTION_END, END], {"finish": "tool_calls"}),
    "ok tools after the thoughts": ([WORD, END_THINK, SECTION, *ADD, *ADD, BLANK, SECTION_END, END], {}),
    "ok tools after an answer": ([WORD, END_THINK, WORD, SECTION, *ADD, SECTION_END, BLANK, END], {}),
    "finish_length": ([WORD, END_THINK, WORD], {"finish": "length"}),
    "finish_length inside the thoughts": ([WORD], {"finish": "length"}),
    "finish_abort": ([WORD], {"finish": "abort"}),
    "finish_abort by an error": ([], {"finish": "error"}),
    "finish_unknown": ([WORD, END_THINK, WORD, END], {"finish": "eos"}),
    "finish_unknown none": ([WORD, END_THINK, WORD, END], {"finish": None}),
    "empty_output": ([], {}),
    "prompt_closed_thoughts": ([WORD, END], {"prompt": [USER, WORD, END, THINK, END_THINK]}),
    "thoughts_not_opened": ([WORD, END_THINK, WORD, END], {"prompt": [USER, WORD, END]}),
    "thoughts_not_opened in an earlier turn only": ([WORD, END_THINK, WORD, END], {"prompt": [THINK, WORD, END, USER]}),
    "unclosed_thoughts": ([WORD, END], {}),
    "unclosed_thoughts without an end": ([WORD], {}),
    "multiple_think_blocks": ([WORD, END_THINK, THINK, WORD, END_THINK, WORD, END], {}),
    "multiple_think_blocks nested": ([WORD, THINK, WORD, END_THINK, WORD, END], {}),
    "multiple_think_blocks closed twice": ([WORD, END_THINK, WORD, END_THINK, WORD, END], {}),
    "thoughts_after_answer": ([WORD, END_THINK, WORD, THINK, WORD, END_THINK, END], {}),
    "blank_reasoning": ([END_THINK, WORD, END], {}),
    "blank_reasoning of white space": ([BLANK, END_THINK, WORD, END], {}),
    "blank_reasoning before tools": ([SECTION, *ADD, SECTION_END, END], {}),
    "short_reasoning": ([WORD, END_THINK, WORD, END], {"min_reasoning_tokens": 2}),
    "degenerate_reasoning": ([WORD] * 300 + [END_THINK, WORD, END], {}),
    "blank_answer": ([WORD, END_THINK, END], {}),
    "blank_answer of white space": ([WORD, END_THINK, BLANK, END], {}),
    "degenerate_answer": ([WORD, END_THINK, *(LONG[:7] * 60), END], {}),
    "unclosed_tool_section": ([WORD, SECTION, *ADD, END], {}),
    "unclosed_tool_section inside a call": ([WORD, SECTION, CALL, NAME, END], {}),
    "unclosed_tool_section without an end": ([WORD, SECTION, CALL, NAME, ARGS, OBJECT], {}),
    "invalid_tool_section empty": ([WORD, SECTION, SECTION_END, END], {}),
    "invalid_tool_section text between calls": ([WORD, SECTION, *ADD, WORD, *ADD, SECTION_END, END], {}),
    "invalid_tool_section call outside": ([WORD, END_THINK, *ADD, END], {}),
    "invalid_tool_section without a name": ([WORD, SECTION, CALL, ARGS, OBJECT, CALL_END, SECTION_END, END], {}),
    "invalid_tool_section stray marker": ([WORD, END_THINK, WORD, ARGS, WORD, END], {}),
    "invalid_tool_section two": ([WORD, SECTION, *ADD, SECTION_END, SECTION, *ADD, SECTION_END, END], {}),
    "invalid_tool_arguments": ([WORD, SECTION, CALL, NAME, ARGS, LIST, CALL_END, SECTION_END, END], {}),
    "invalid_tool_arguments none": ([WORD, SECTION, CALL, NAME, ARGS, CALL_END, SECTION_END, END], {}),
    "text_after_tool_section": ([WORD, SECTION, *ADD, SECTION_END, WORD, END], {}),
    "no_end_of_turn": ([WORD, END_THINK, WORD], {}),
    "no_end_of_turn after tools": ([WORD, SECTION, *ADD, SECTION_END], {}),
    "end_of_turn_inside": ([WORD, END_THINK, WORD, END, WORD], {}),
    "end_of_turn_inside twice": ([WORD, END_THINK, WORD, END, END], {}),
    "foreign_control_token": ([WORD, END_THINK, WORD, USER, WORD, END], {}),
    "foreign_control_token in the thoughts": ([WORD, USER, END_THINK, WORD, END], {}),
    "foreign_control_token after the end": ([WORD, END_THINK, WORD, END, USER], {}),
    "replacement_character": ([WORD, END_THINK, BROKEN, END], {}),
    "replacement_character in a call's id": (
        [WORD, SECTION, CALL, NAME, BROKEN, ARGS, OBJECT, CALL_END, SECTION_END, END],
        {"finish": "tool_calls"},
    ),
    "replacement_character in the thoughts": ([WORD, BROKEN, END_THINK, WORD, END], {}),
    "token_out_of_range": ([WORD, END_THINK, VOCAB_SIZE, END], {}),
    "token_out_of_range negative": ([WORD, -1], {}),
    "token_out_of_range in the prompt": ([WORD, END_THINK, WORD, END], {"prompt": [2**40, THINK]}),
}


@pytest.mark.parametrize("name", TURNS)
def test_reason_of_a_turn(name: str) -> None:
    output, changes = TURNS[name]
    protocol = toy_protocol(min_reasoning_tokens=changes.get("min_reasoning_tokens", 1))
    reading = protocol.read(changes.get("prompt", PROMPT), output, changes.get("finish", "stop"))
    assert reading.reason == name.split()[0]
    assert reading.complete is (reading.reason is Reason.OK)
    assert bool(reading.detail) is not reading.complete


def test_every_reason_has_a_turn() -> None:
    elsewhere = {Reason.MARKER_AS_TEXT}  # only where markers are ordinary text: test_protocol_text.py
    assert {Reason(name.split()[0]) for name in TURNS} == set(Reason) - elsewhere


def test_spans_are_half_open_and_hold_no_control_tokens() -> None:
    #          0     1     2          3     4      5        6     7     8     9       10        11           12
    output = [THINK, WORD, END_THINK, WORD, BLANK, SECTION, CALL, NAME, ARGS, OBJECT, CALL_END, SECTION_END, END]
    reading = toy_protocol().read(PROMPT, output, "stop")
    assert reading.spans == (
        Span(SpanKind.REASONING, 1, 2),
        Span(SpanKind.ANSWER, 3, 5),
        Span(SpanKind.TOOL_CALL, 7, 10),
    )
    assert reading.num_reasoning_tokens == 1
    assert reading.reasoning == "word"
    assert reading.content == "word \n"
    assert reading.tool_calls == (ToolCall("functions.add:0", "add", '{"a": 1}'),)


def test_spans_found_before_a_fault_are_kept_for_the_quarantine() -> None:
    reading = toy_protocol().read(PROMPT, [WORD, END_THINK, WORD], "length")
    assert reading.reason is Reason.FINISH_LENGTH
    assert [span.kind for span in reading.spans] == [SpanKind.REASONING, SpanKind.ANSWER]
    assert reading.content == "word"


def test_a_replacement_character_that_the_prompt_holds_may_be_quoted() -> None:
    reading = toy_protocol().read([BROKEN, *PROMPT], [WORD, END_THINK, BROKEN, END], "stop")
    assert reading.complete


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        (PROMPT, "opened"),
        ([*PROMPT, END_THINK], "closed"),
        ([USER, WORD, END], "absent"),
        ([THINK, WORD, END_THINK, WORD, END, USER, WORD, END], "absent"),
        ([], "absent"),
    ],
)
def test_prompt_state(prompt: list[int], state: str) -> None:
    assert toy_protocol().prompt_state(prompt) == state


@pytest.mark.parametrize("text", ["", " \t\n", "\u200b\ufeff\u00ad", "\u00a0\u2028\u3000", "\x00\x1f", "\ufffc"])
def test_is_blank(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(text + ".")


# --- An independent re-statement of the rule: one letter a token, one regular expression a turn. ---

_LETTERS = {THINK: "T", END_THINK: "t", END: "E", SECTION: "S", SECTION_END: "s", CALL: "C", ARGS: "a", CALL_END: "c",
            USER: "U", BLANK: " "}  # fmt: skip
_TEXT = "[^TtESsCacU]*"
_CALLS = rf"S(?P<calls%d>(?: *C{_TEXT}a{_TEXT}c)+) *s *"
_TURN = re.compile(rf"(?P<open> *T)?(?P<r>{_TEXT})(?:t(?P<a>{_TEXT})(?:{_CALLS % 1})?|{_CALLS % 2})E")


def restated_rule(prompt_opens: bool, ids: list[int], finish: str | None) -> bool:
    """True when the turn is complete, degenerate texts aside."""
    if finish not in {"stop", "tool_calls"} or any(not 0 <= i < VOCAB_SIZE for i in ids) or BROKEN in ids:
        return False
    match = _TURN.fullmatch("".join(_LETTERS.get(i, "w") for i in ids))
    if not match or not (prompt_opens or match["open"]) or not match["r"].strip():
        return False
    start, end = max(match.span("calls1"), match.span("calls2"))  # (-1, -1) where there are none
    if start < 0:
        return bool((match["a"] or "").strip())
    for call in "".join(TEXTS.get(i, f"w{i}") for i in ids[start:end]).split("<call>")[1:]:
        name, arguments = call.split("</call>")[0].split("<args>")
        try:
            if not name.strip() or not isinstance(json.loads(arguments), dict):
                return False
        except ValueError:
            return False
    return True


tokens = st.one_of(st.integers(1, 15), st.integers(-1, VOCAB_SIZE))


@st.composite
def turns(draw: st.DrawFn) -> list[int]:
    """Random tokens, or a turn of the table with a few tokens put in, left out or changed."""
    if draw(st.booleans()):
        return draw(st.lists(tokens, max_size=30))
    group = draw(st.sampled_from(["ok", ""]))
    found = [output for name, (output, _) in TURNS.items() if len(output) < 20 and name.startswith(group)]
    ids = list(draw(st.sampled_from(found)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(ids)))
        ids[at : at + draw(st.integers(0, 2))] = draw(st.lists(tokens, max_size=2))
    return ids


_AFTER_THE_PROMPT = [n for n, (output, changes) in TURNS.items() if len(output) < 100 and not set(changes) - {"finish"}]


@pytest.mark.parametrize("name", _AFTER_THE_PROMPT)
def test_the_restated_rule_agrees_on_the_table(name: str) -> None:
    output, changes = TURNS[name]
    assert restated_rule(True, output, changes.get("finish", "stop")) is name.startswith("ok")


@given(ids=turns(), opens=st.booleans(), finish=st.sampled_from(["stop", "stop", "tool_calls", "length", "x", None]))
def test_complete_means_what_the_rule_says(ids: list[int], opens: bool, finish: str | None) -> None:
    reading = toy_protocol().read(PROMPT if opens else [USER, END], ids, finish)
    degenerate = reading.reason in {Reason.DEGENERATE_REASONING, Reason.DEGENERATE_ANSWER}
    assert reading.complete == (restated_rule(opens, ids, finish) and not degenerate), reading
    ends = [0, *(end for span in reading.spans for end in (span.start, span.end)), len(ids)]
    assert ends == sorted(ends)


@given(
    prompt=st.lists(st.integers(-(2**70), 2**70), max_size=6), ids=st.lists(st.integers(-(2**70), 2**70), max_size=6)
)
def test_no_ids_crash_the_reader(prompt: list[int], ids: list[int]) -> None:
    for vocab_size in (VOCAB_SIZE, None):
        assert not toy_protocol(vocab_size=vocab_size).read(prompt, [*ids, BROKEN], "stop").complete


# --- Presets and real tokenizers ---


def test_kimi_ids_are_checked_against_the_real_vocabulary() -> None:
    protocol = ReasoningProtocol.from_tokenizer(KimiTokenizer(), "kimi-k2.5", vocab_size=163840)
    assert protocol.markers.think_start == ((163606,),)
    assert protocol.markers.think_end == ((163607,),)
    assert protocol.markers.stop_token_ids == (163586,)
    assert {163595, 163596, 163597, 163598, 163599, 163606, 163607, 163586} == set(protocol.markers.forced_draft_ids)
    # <think> is in the prompt; "Hello world" </think> "Hello world" <|im_end|>
    reading = protocol.read([163588, 163606], [19180, 2695, 163607, 19180, 2695, 163586], "stop")
    assert reading.complete
    assert reading.reasoning == reading.content == "Hello world"


@pytest.mark.parametrize("preset", ["kimi-k2.5", "kimi-k2-thinking"])
def test_a_tokenizer_of_another_model_is_named(tiny_tokenizer, preset: str) -> None:
    with pytest.raises(TargetError, match=rf"gives <\|im_end\|> the id \d+; {preset} must give 163586"):
        ReasoningProtocol.from_tokenizer(tiny_tokenizer, preset)


def test_a_tokenizer_without_think_tokens_is_refused(tiny_tokenizer) -> None:
    preset = ProtocolPreset(name="other", think_start="<reason>")
    with pytest.raises(TargetError, match="no token for <reason>"):
        ReasoningProtocol.from_tokenizer(tiny_tokenizer, preset)


def test_the_tiny_target_reads_as_kimi(tiny_tokenizer) -> None:
    protocol = ReasoningProtocol.from_tokenizer(tiny_tokenizer, "tiny-kimi", vocab_size=len(tiny_tokenizer))
    text = "add them<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>" \
           '{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'  # fmt: skip
    reading = protocol.read(tiny_tokenizer.encode("<think>"), tiny_tokenizer.encode(text), "stop")
    assert reading.complete
    assert reading.tool_calls == (ToolCall("functions.add:0", "add", '{"a": 1}'),)
    assert reading.tool_calls[0].as_openai()["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_qwen3_calls_are_json_objects() -> None:
    protocol = toy_protocol(preset=ProtocolPreset(name="toy-json", tool_format="json"))
    TEXTS[40] = '{"name": "add", "arguments": {"a": 1}}'
    try:
        reading = protocol.read(PROMPT, [WORD, END_THINK, CALL, 40, CALL_END, BLANK, CALL, 40, CALL_END, END], "stop")
        broken = protocol.read(PROMPT, [WORD, END_THINK, CALL, OBJECT, CALL_END, END], "stop")
    finally:
        del TEXTS[40]
    assert reading.complete
    assert [call.id for call in reading.tool_calls] == ["functions.add:0", "functions.add:1"]
    assert broken.reason is Reason.INVALID_TOOL_ARGUMENTS


def test_a_family_without_a_tool_grammar_refuses_calls() -> None:
    protocol = toy_protocol(preset=PRESETS["deepseek-r1"])
    assert protocol.read(PROMPT, [WORD, SECTION, *ADD, SECTION_END, END], "stop").reason is Reason.INVALID_TOOL_SECTION
