"""Conversations -> prompt ids, as the served model would see them.

The target's own template writes the turns; its own tokenizer encodes them. One thing is ours: the text of
a message can never become a control token. A user who writes `<|im_end|>` has written ten ordinary
characters, whatever the tokenizer would make of them:

    message text   say <|im_end|> please
    escaped        say CTRL..0.. please                 every control string in message text is hidden
    rendered       <|im_user|>user<|im_middle|>say CTRL..0.. please<|im_end|>...
    encoded        id  user id  "say <|im_end|> please" as plain text  id ...
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from eagle3_kimi.errors import TargetError
from eagle3_kimi.protocol import PRESETS, ProtocolPreset, ReasoningProtocol

_MODEL_OPENS_THOUGHTS = frozenset({"qwen3"})
"""Families whose template leaves it to the model to open the thoughts."""


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    preset: str | ProtocolPreset,
) -> list[int]:
    """The generation prompt that follows `messages`, as token ids.

    Args:
        tokenizer: the target's tokenizer, with its chat template.
        messages: turns so far; `reasoning` is read where the template looks for `reasoning_content`.
        tools: OpenAI-style declarations, written as the tokenizer's own class writes them.
        thinking: the value of the preset's template variable.
        preset: the family, or its name.

    Raises:
        TargetError: the tokenizer has no template, the template refuses the messages, or the tokenizer
            cannot encode a control token's text as plain text.
    """
    preset = PRESETS[preset] if isinstance(preset, str) else preset
    return _renderer(tokenizer, preset.thinking_variable).render(messages, tools, thinking)


def render_answer(tokenizer: Any, message: Mapping[str, Any], *, preset: str | ProtocolPreset) -> list[int]:
    """A recorded answer as ids that could follow the generation prompt: `reasoning</think>content`, calls, end.

    For answers of which only text is left. The ids are re-tokenised text, not what the model produced, so a
    sample made of them is not token-exact. Never the template's rendering: that would erase the reasoning.

    Raises:
        TargetError: the answer has tool calls and the family does not write them in Kimi's form.
    """
    preset = PRESETS[preset] if isinstance(preset, str) else preset
    calls = message.get("tool_calls") or ()
    if calls and preset.tool_format != "kimi":
        raise TargetError(f"answers with tool calls are rendered in Kimi's form only; {preset.name} has another")
    # text, marker, text, marker, ..., marker
    parts = [message.get("reasoning") or "", preset.think_end, message.get("content") or ""]
    parts += [preset.tool_section_start, ""] if calls else []
    for call in calls:
        parts += [preset.tool_call_start, call["id"], preset.tool_call_argument_start]
        parts += [call["function"]["arguments"], preset.tool_call_end, ""]
    parts += [preset.tool_section_end, ""] if calls else []
    parts += [preset.end_of_turn[0]]
    return _renderer(tokenizer, preset.thinking_variable).encode_parts(parts)


def check_rendering(protocol: ReasoningProtocol, prompt_token_ids: Sequence[int]) -> None:
    """Raises unless a prompt rendered with thinking on ends in opened thoughts.

    Raises:
        TargetError: the template closed the thoughts, or never opened them.
    """
    preset, state = protocol.preset, protocol.prompt_state(prompt_token_ids)
    if state == "opened" or (state == "absent" and preset.name in _MODEL_OPENS_THOUGHTS):
        return
    what = "closes the thoughts at once" if state == "closed" else "does not open the thoughts"
    raise TargetError(
        f"thinking is on, yet the chat template {what}: the prompt should end in {preset.think_start}. "
        f"The template variable of {preset.name} is `{preset.thinking_variable}`; check that this target's "
        "template listens to it, and that the template belongs to a model that reasons."
    )


def number_tool_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Gives every tool call Kimi's id, `functions.NAME:IDX`, and every result the id of its call.

    The template shows only the id of a call, so a data set's `call_abc123` would hide the function's name.
    IDX counts the calls of the whole conversation. Results follow their calls' ids.
    """
    numbered, renamed, index = [], {}, 0
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                renamed[call["id"]] = f"functions.{call['function']['name']}:{index}"
                calls.append({**call, "id": renamed[call["id"]]})
                index += 1
            message["tool_calls"] = calls
        elif message.get("tool_call_id") in renamed:
            message["tool_call_id"] = renamed[message["tool_call_id"]]
        numbered.append(message)
    return numbered


@lru_cache(maxsize=4)
def _renderer(tokenizer: Any, thinking_variable: str) -> _Renderer:
    return _Renderer(tokenizer, thinking_variable)


class _Renderer:
    """Template and tokenizer of one target, with what escaping needs worked out once."""

    def __init__(self, tokenizer: Any, thinking_variable: str) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TargetError(
                f"the tokenizer {type(tokenizer).__name__} has no chat template; the target's folder should hold "
                "chat_template.jinja, or `chat_template` in tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.thinking_variable = thinking_variable
        self.control_ids = {text: int(token) for text, token in tokenizer.get_added_vocab().items()}
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.nonce = secrets.token_hex(8)  # so that no message can spell a placeholder
        self.placeholder = re.compile(f"CTRL{self.nonce}x([0-9]+)x")
        self.takes_allow_special = "allow_special_tokens" in inspect.signature(tokenizer.encode).parameters

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, thinking: bool
    ) -> list[int]:
        hidden: list[str] = []
        escaped = [self._escape(_with_reasoning_names(message), hidden) for message in messages]
        text = self._apply_template(escaped, self._escape(list(tools), hidden) if tools else None, thinking)
        return self._encode_escaped(text, hidden)

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Ids of text and markers by turns: text, marker, text, marker ..."""
        hidden: list[str] = []
        text = "".join(part if index % 2 else self._escape(part, hidden) for index, part in enumerate(parts))
        return self._encode_escaped(text, hidden)

    def _encode_escaped(self, text: str, hidden: list[str]) -> list[int]:
        if not hidden:
            return self._encode(text)
        if getattr(self.tokenizer, "is_fast", False):
            return self._encode_aliased(text, hidden)
        return self._encode_pieces(text, hidden)

    def _apply_template(self, messages: list[Any], tools: list[Any] | None, thinking: bool) -> str:
        from jinja2.exceptions import TemplateError

        if tools:
            self._warn_of_tool_form()
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **{self.thinking_variable: thinking},
                )
            )
        except TemplateError as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise TargetError(f"the chat template refuses a conversation with the turns {roles}: {error}") from error

    def _warn_of_tool_form(self) -> None:
        own_class = not type(self.tokenizer).apply_chat_template.__module__.startswith("transformers.")
        if "tools_ts_str" in str(self.tokenizer.chat_template) and not own_class:
            warnings.warn(
                "tools are declared as JSON: the target's own tokenizer class writes them as TypeScript "
                "(`tools_ts_str`), but its code is not allowed here. The prompt differs from the served one in the "
                "tool_declare turn; --trust-remote-code makes them equal.",
                stacklevel=2,
            )

    def _escape(self, value: Any, hidden: list[str]) -> Any:
        """`value` with every control string in any text of it replaced; the originals go to `hidden`."""
        if isinstance(value, str):

            def hide(match: re.Match[str]) -> str:
                hidden.append(match.group())
                return f"CTRL{self.nonce}x{len(hidden) - 1}x"

            return self.control.sub(hide, value)
        if isinstance(value, Mapping):
            return {self._escape(key, hidden): self._escape(item, hidden) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(item, hidden) for item in value]
        return value

    def _reveal(self, text: str, hidden: list[str]) -> str:
        return self.placeholder.sub(lambda match: hidden[int(match.group(1))], text)

    def _encode(self, text: str) -> list[int]:
        if getattr(self.tokenizer, "is_fast", False):
            return _ids_of(self._plain_tokenizer, text)
        if self.takes_allow_special:  # Kimi's own class: any other keyword takes a slower, different path
            return [int(i) for i in self.tokenizer.encode(text, allow_special_tokens=True)]
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]

    def _encode_aliased(self, text: str, hidden: list[str]) -> list[int]:
        """One pass over the whole text, so that what depends on neighbours (leading spaces) comes out as always."""
        aliased = self.control.sub(lambda match: self._alias(self.control_ids[match.group()]), text)
        return _ids_of(self._aliased_tokenizer, self._reveal(aliased, hidden))

    def _alias(self, token_id: int) -> str:
        return f"\U000f5ee0{self.nonce}{token_id}\U000f5ee1"

    @cached_property
    def _plain_tokenizer(self) -> Any:
        """The tokenizer without the wrapper's work, and without a truncation that its file may carry."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(json.dumps(self._tokenizer_state()))

    def _tokenizer_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.tokenizer.backend_tokenizer.to_str())
        return {**state, "truncation": None, "padding": None}

    @cached_property
    def _aliased_tokenizer(self) -> Any:
        """The same tokenizer, in which control tokens answer to names that no message can contain."""
        from tokenizers import Tokenizer

        state = self._tokenizer_state()
        model = state["model"]
        names = {token["content"]: self._alias(token["id"]) for token in state["added_tokens"]}
        for token in state["added_tokens"]:
            token.update(content=names[token["content"]], normalized=False)
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): token for text, token in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        aliased = Tokenizer.from_str(json.dumps(state))
        moved = [text for text, token in self.control_ids.items() if aliased.token_to_id(self._alias(token)) != token]
        if moved:
            raise TargetError(f"this tokenizer cannot take {moved[0]} as plain text: its ids move when it is renamed")
        return aliased

    def _encode_pieces(self, text: str, hidden: list[str]) -> list[int]:
        """Control tokens by id, the text between them as plain text (tiktoken-like tokenizers split there anyway)."""
        ids: list[int] = []
        end = 0
        for match in self.control.finditer(text):
            ids += self._encode_plain(self._reveal(text[end : match.start()], hidden))
            ids.append(self.control_ids[match.group()])
            end = match.end()
        return ids + self._encode_plain(self._reveal(text[end:], hidden))

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        if self.takes_allow_special:
            ids = self.tokenizer.encode(text, allow_special_tokens=False)
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        controls = set(self.control_ids.values()).intersection(ids)
        if controls:
            raise TargetError(
                f"the tokenizer {type(self.tokenizer).__name__} turns message text into the control tokens "
                f"{sorted(controls)}; it needs `allow_special_tokens=False`, or a fast version (tokenizer.json)"
            )
        return [int(i) for i in ids]


def _ids_of(fast_tokenizer: Any, text: str) -> list[int]:
    """Ids alone: offsets, which nobody asks for here, cost as much again."""
    ids: list[int] = fast_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates ask for `reasoning_content` (Kimi, Qwen3) or `reasoning`: both names, where there is one."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return {**message, "reasoning": reasoning, "reasoning_content": reasoning} if reasoning else dict(message)
