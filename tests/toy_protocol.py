"""A vocabulary of a dozen tokens, so that turns can be written out as id sequences."""

from __future__ import annotations

from eagle3_kimi.protocol import Markers, ProtocolPreset, ReasoningProtocol

THINK, END_THINK, END, SECTION, SECTION_END, CALL, ARGS, CALL_END, USER = range(1, 10)
WORD, BLANK, OBJECT, LIST, NAME, BROKEN = range(10, 16)
PROMPT = [USER, WORD, END, THINK]
VOCAB_SIZE = 64

TEXTS = {THINK: "<think>", END_THINK: "</think>", END: "<|im_end|>", SECTION: "<section>", SECTION_END: "</section>",
         CALL: "<call>", ARGS: "<args>", CALL_END: "</call>", USER: "<|im_user|>", WORD: "word", BLANK: " \n",
         OBJECT: '{"a": 1}', LIST: "[1]", NAME: "functions.add:0", BROKEN: "\ufffd"}  # fmt: skip


def decode(ids: list[int]) -> str:
    return "".join(TEXTS.get(token, f"w{token}") for token in ids)


def toy_protocol(**changes: object) -> ReasoningProtocol:
    preset = ProtocolPreset(name="toy", tool_format="kimi")
    markers = Markers(
        think_start=((THINK,),),
        think_end=((END_THINK,),),
        end_of_turn=((END,),),
        tool_section_start=((SECTION,),),
        tool_section_end=((SECTION_END,),),
        tool_call_start=((CALL,),),
        tool_call_argument_start=((ARGS,),),
        tool_call_end=((CALL_END,),),
        foreign=((USER,),),
    )
    options = {"preset": preset, "vocab_size": VOCAB_SIZE, **changes}
    return ReasoningProtocol(markers, decode, **options)
