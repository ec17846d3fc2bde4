"""The markers of model families: their texts, and the token sequences that spell them in a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_kimi.errors import TargetError


@dataclass(frozen=True, kw_only=True)
class ProtocolPreset:
    """The markers of a model family, as text; their ids come from the tokenizer."""

    name: str
    think_start: str = "<think>"
    think_end: str = "</think>"
    end_of_turn: tuple[str, ...] = ("<|im_end|>",)
    """Any of these ends a turn; the first is the usual one."""
    tool_format: str = ""
    """`kimi` (a section of calls), `json` (Qwen3: one JSON object a call), or `` (calls are refused)."""
    tool_section_start: str = ""
    tool_section_end: str = ""
    tool_call_start: str = ""
    tool_call_argument_start: str = ""
    tool_call_end: str = ""
    foreign: tuple[str, ...] = ()
    """Control tokens that never belong inside an assistant turn."""
    thinking_variable: str = "thinking"
    """The chat-template variable that switches thinking on and off."""
    expected_ids: tuple[tuple[str, int], ...] = ()
    """Marker text and the id it must have; checked at start."""
    literal_markers_allowed: bool = True
    """False where markers are ordinary text: the marker's text inside a span is then a marker."""


_KIMI_TOOLS: dict[str, Any] = {
    "tool_format": "kimi",
    "tool_section_start": "<|tool_calls_section_begin|>",
    "tool_section_end": "<|tool_calls_section_end|>",
    "tool_call_start": "<|tool_call_begin|>",
    "tool_call_argument_start": "<|tool_call_argument_begin|>",
    "tool_call_end": "<|tool_call_end|>",
    "foreign": ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[BOS]", "[PAD]", "[UNK]"),
}

PRESETS: dict[str, ProtocolPreset] = {
    preset.name: preset
    for preset in (
        ProtocolPreset(
            name="kimi-k2.5",
            **_KIMI_TOOLS,
            expected_ids=(("<|im_end|>", 163586), ("<think>", 163606), ("</think>", 163607)),
        ),
        ProtocolPreset(
            name="kimi-k2-thinking",
            **_KIMI_TOOLS,
            expected_ids=(("<|im_end|>", 163586), ("<think>", 163606), ("</think>", 163607)),
        ),
        ProtocolPreset(name="tiny-kimi", **_KIMI_TOOLS),
        ProtocolPreset(
            name="deepseek-r1",
            end_of_turn=("<｜end▁of▁sentence｜>",),
            tool_section_start="<｜tool▁calls▁begin｜>",
            foreign=("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"),
        ),
        ProtocolPreset(
            name="qwen3",
            end_of_turn=("<|im_end|>", "<|endoftext|>"),
            tool_format="json",
            tool_call_start="<tool_call>",
            tool_call_end="</tool_call>",
            foreign=("<|im_start|>",),
            thinking_variable="enable_thinking",
        ),
        ProtocolPreset(name="text-think", end_of_turn=("</s>",), literal_markers_allowed=False),
    )
}
"""`text-think` is for families whose think tags are ordinary text over several tokens."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker found in token ids, at `[start, end)`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Markers:
    """Each marker as the token sequences that spell it (one sequence of one id, for most families)."""

    think_start: tuple[tuple[int, ...], ...]
    think_end: tuple[tuple[int, ...], ...]
    end_of_turn: tuple[tuple[int, ...], ...]
    tool_section_start: tuple[tuple[int, ...], ...] = ()
    tool_section_end: tuple[tuple[int, ...], ...] = ()
    tool_call_start: tuple[tuple[int, ...], ...] = ()
    tool_call_argument_start: tuple[tuple[int, ...], ...] = ()
    tool_call_end: tuple[tuple[int, ...], ...] = ()
    foreign: tuple[tuple[int, ...], ...] = ()
    _by_first: dict[int, list[tuple[tuple[int, ...], str]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_first: dict[int, list[tuple[tuple[int, ...], str]]] = {}
        for name in MARKER_NAMES:
            for sequence in getattr(self, name):
                by_first.setdefault(sequence[0], []).append((sequence, name))
        for candidates in by_first.values():
            candidates.sort(key=lambda item: -len(item[0]))  # the longest match wins
        object.__setattr__(self, "_by_first", by_first)

    def find(self, ids: Sequence[int]) -> list[Marker]:
        """All markers in `ids`, left to right, not overlapping."""
        by_first, found, skip_to = self._by_first, [], 0
        for index, token in enumerate(ids):
            if token not in by_first or index < skip_to:
                continue
            for sequence, name in by_first[token]:
                if len(sequence) == 1 or tuple(ids[index : index + len(sequence)]) == sequence:
                    skip_to = index + len(sequence)
                    found.append(Marker(name, index, skip_to))
                    break
        return found

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids the engine stops on: the single-token end-of-turn markers."""
        return tuple(s[0] for s in self.end_of_turn if len(s) == 1)

    @property
    def forced_draft_ids(self) -> tuple[int, ...]:
        """Every token of every marker a turn may contain: always in the draft vocabulary."""
        names = [name for name in MARKER_NAMES if name != "foreign"]
        return tuple(sorted({i for name in names for s in getattr(self, name) for i in s}))


MARKER_NAMES = (
    "think_start",
    "think_end",
    "end_of_turn",
    "tool_section_start",
    "tool_section_end",
    "tool_call_start",
    "tool_call_argument_start",
    "tool_call_end",
    "foreign",
)


_LEFT_CONTEXTS = ("", "a", ".", " ", "\n")


def _sequences(tokenizer: Any, text: str, preset: ProtocolPreset) -> tuple[tuple[int, ...], ...]:
    """Every token sequence that spells `text`: after a letter, a full stop, white space, and alone.

    A single-token marker has one. A marker that is ordinary text has several, since a
    SentencePiece tokenizer puts a leading-space piece before it or not.
    """
    single = (tokenizer.get_vocab() if preset.literal_markers_allowed else tokenizer.get_added_vocab()).get(text)
    if single is not None:
        return ((int(single),),)
    sequences: list[tuple[int, ...]] = []
    for left in _LEFT_CONTEXTS:
        ids = [int(i) for i in tokenizer.encode(left + text, add_special_tokens=False)]
        for start in range(len(ids)):
            if tokenizer.decode(ids[start:]).strip() == text and tuple(ids[start:]) not in sequences:
                sequences.append(tuple(ids[start:]))
    return tuple(sequences)


def build_markers(tokenizer: Any, preset: ProtocolPreset) -> Markers:
    """The markers of `preset` with the ids of `tokenizer`; raises `TargetError` where one that is needed is missing."""
    wanted: dict[str, tuple[str, ...]] = {
        "think_start": (preset.think_start,),
        "think_end": (preset.think_end,),
        "end_of_turn": preset.end_of_turn,
    }
    for name in MARKER_NAMES[3:-1]:
        text = getattr(preset, name)
        wanted[name] = (text,) if text else ()
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name, texts in wanted.items():
        sequences = tuple(s for text in texts for s in _sequences(tokenizer, text, preset))
        needed = name in {"think_start", "think_end", "end_of_turn"}
        if needed and preset.literal_markers_allowed and any(len(s) > 1 for s in sequences):
            sequences = tuple(s for s in sequences if len(s) == 1)
        if needed and not sequences:
            raise TargetError(
                f"the tokenizer has no token for {' or '.join(texts)} ({name}); a {preset.name} target must have one. "
                "Name a target that reasons, or the preset of its family."
            )
        found[name] = sequences
    vocab = tokenizer.get_vocab()
    found["foreign"] = tuple((int(vocab[text]),) for text in preset.foreign if text in vocab)
    return Markers(**found)
