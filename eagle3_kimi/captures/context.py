"""What is known about the request behind a response, and what that says about the thoughts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from eagle3_kimi.protocol import PRESETS, ReasoningProtocol

_KIMI = PRESETS["kimi-k2.5"]
SECTION_STARTS = (_KIMI.tool_section_start, "<|tool_call_section_begin|>")
SECTION_ENDS = (_KIMI.tool_section_end, "<|tool_call_section_end|>")
"""Serving engines know both spellings."""
CALL_START, ARGUMENTS_START, CALL_END = _KIMI.tool_call_start, _KIMI.tool_call_argument_start, _KIMI.tool_call_end
TRAILING_ENDS = ("[EOS]", "[EOT]")
"""Ends of turn that people also write about: a marker only as the last thing in a text."""


@dataclass(frozen=True, kw_only=True)
class CaptureContext:
    """What is known about the request. Without anything: Kimi-K2.5, thinking on, prompt ended in `<think>`."""

    prompt_suffix: str | None = None
    """The end of the rendered prompt; it decides over every flag. None: not known."""
    thinking: bool | None = None
    """Whether the prompt was rendered with thinking on, where the rendered prompt is not known."""
    prompt: Any = None
    """What the user asked, as text or messages: an echo and a replacement character are judged by it."""
    request_body: Mapping[str, Any] = field(default_factory=dict)
    """The JSON body that was sent."""
    think_tags: tuple[str, str] = (_KIMI.think_start, _KIMI.think_end)
    """Opening and closing tag of the model family."""
    think_end_id: int | None = None
    eos_ids: tuple[int, ...] | None = None
    """Ids that end a turn. None: Kimi's."""
    token_table: Mapping[int, bytes] | None = None
    """Id -> its bytes, to read token ids without a tokenizer."""
    protocol: ReasoningProtocol | None = None
    """Reads token ids with the target's own tokenizer; decides over everything else."""

    @classmethod
    def of(cls, context: CaptureContext | Mapping[str, Any] | None) -> CaptureContext:
        """From a mapping with the fields' names; other keys are notes and are left alone."""
        if context is None:
            return _DEFAULT
        if isinstance(context, CaptureContext):
            return context
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in context.items() if key in known and value is not None}
        if "think_tags" in values:
            opening, closing = values["think_tags"]
            values["think_tags"] = (str(opening), str(closing))
        if "eos_ids" in values:
            values["eos_ids"] = tuple(int(i) for i in values["eos_ids"])
        if "token_table" in values:
            values["token_table"] = {int(i): _bytes_of(v) for i, v in values["token_table"].items()}
        return cls(**values)

    @cached_property
    def markers(self) -> TextMarkers:
        table = self.token_table or {}
        ends = [table[i].decode("utf-8", "replace") for i in self.eos_ids or () if i in table]
        return TextMarkers(self.think_tags, tuple(dict.fromkeys([*_ENDS, *ends])))

    @cached_property
    def prompt_text(self) -> str:
        return text_of_prompt(self.prompt)


class TextMarkers:
    """The marker strings of a family and where they stand in a text."""

    def __init__(self, think_tags: tuple[str, str], ends: tuple[str, ...]) -> None:
        self.opening, self.closing = think_tags
        self.ends = ends
        names: dict[str, str] = {self.opening: "opening", self.closing: "closing"}
        names |= dict.fromkeys(ends, "end")
        names |= dict.fromkeys((*SECTION_STARTS, CALL_START), "tool")
        names |= dict.fromkeys((*SECTION_ENDS, ARGUMENTS_START, CALL_END), "tool_rest")
        names |= {text: "foreign" for text in _KIMI.foreign if text.startswith("<|")}
        self.names = names
        self.pattern = re.compile("|".join(re.escape(t) for t in sorted(names, key=len, reverse=True)))
        self._needles = tuple(
            dict.fromkeys([self.opening, self.closing, "<|", *(e for e in ends if not e.startswith("<|"))])
        )

    def may_be_in(self, text: str) -> bool:
        """A quick no for the usual text."""
        for needle in self._needles:  # a loop: this runs on every text of every record
            if needle in text:
                return True
        return text.endswith("]") and text.endswith(TRAILING_ENDS)


_ENDS = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "<|eot_id|>")
_DEFAULT = CaptureContext()


def state_of_rendered(text: str, think_tags: tuple[str, str]) -> str:
    """What the end of a rendered prompt says about the thoughts: `opened`, `closed` or `absent`."""
    turn = max(text.rfind("<|im_middle|>"), text.rfind("<|im_end|>"))
    opened, closed = text.rfind(think_tags[0], turn + 1), text.rfind(think_tags[1], turn + 1)
    if opened < 0 and closed < 0:
        return "absent"
    return "opened" if opened > closed else "closed"


def switched_off(request: Mapping[str, Any]) -> bool:
    """True when the request's body switched Kimi's thinking off.

    Only `thinking` does; the template ignores `enable_thinking`, and a raw HTTP body's `extra_body`
    never reaches the template.
    """
    variables = request.get("chat_template_kwargs")
    if isinstance(variables, dict) and variables.get("thinking") is False:
        return True
    thinking = request.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") == "disabled"


def text_of_prompt(prompt: Any) -> str:
    """All text of a prompt given as text, messages or parts."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        return text_of_prompt(prompt.get("content", prompt.get("text", prompt.get("value"))))
    return "\n".join(text_of_prompt(item) for item in prompt) if isinstance(prompt, list | tuple) else ""


def _bytes_of(value: Any) -> bytes:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else str(value).encode("utf-8", "surrogatepass")
