"""Acceptance split by what was being written, from the tokens that each engine step adds.

    tokens_per_step      1 (prefill) | 3            | 1        | 4
    output               r             r r r          </think>   a a a <|im_end|>
    belongs to                         reasoning      reasoning  answer

A step belongs to the span of its first token. The engine's own counters are totals and include proposals behind an
end of turn; steps count what was delivered, so on short answers their acceptance length is a little lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from eagle3_kimi.evaluation.dialogues import Decoding
from eagle3_kimi.protocol import ReasoningProtocol, SpanKind

_FIRST_EDGE = 256
_TOOL_STARTS = frozenset({"tool_section_start", "tool_call_start"})


@dataclass(frozen=True, kw_only=True)
class Step:
    """One draft and its verification."""

    kind: SpanKind
    """Span of the first token it added."""
    context: int
    """Tokens before it: the prompt and the turn so far."""
    tokens: int
    """It added: accepted proposals and the bonus token."""


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Sums over some steps."""

    steps: int
    tokens: int
    accepted: tuple[int, ...]
    """Steps whose first i+1 proposals were accepted."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a step, bonus token included."""
        return self.tokens / max(self.steps, 1)

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        return tuple(count / max(self.steps, 1) for count in self.accepted)


def list_steps(protocol: ReasoningProtocol, prompt: Sequence[int], decoding: Decoding) -> list[Step]:
    """The steps of one turn, without the prefill's."""
    kinds = label_tokens(protocol, prompt, decoding.token_ids)
    steps, position = [], sum(decoding.tokens_per_step[:1])
    for tokens in decoding.tokens_per_step[1:]:
        steps.append(Step(kind=kinds[position], context=len(prompt) + position, tokens=tokens))
        position += tokens
    return steps


def label_tokens(protocol: ReasoningProtocol, prompt: Sequence[int], output: Sequence[int]) -> list[SpanKind]:
    """The span of each output token, of complete turns and of others, with thinking on or off.

    A marker belongs to what it closes (`</think>`, the end of turn) or opens (a tool section).
    """
    thinks = protocol.prompt_state(prompt) == "opened"
    kinds, current, position = [], SpanKind.REASONING if thinks else SpanKind.ANSWER, 0
    for marker in protocol.markers.find(output):
        kinds += [current] * (marker.start - position)
        position = marker.end
        if marker.name == "think_start":
            current = SpanKind.REASONING
        elif marker.name in _TOOL_STARTS:
            current = SpanKind.TOOL_CALL
        kinds += [current] * (marker.end - marker.start)
        if marker.name in {"think_end", "tool_section_end"}:
            current = SpanKind.ANSWER
    return kinds + [current] * (len(output) - position)


def count_steps(steps: Iterable[Step], num_speculative_tokens: int) -> StepCounts:
    """Adds up."""
    tokens = [step.tokens for step in steps]
    return StepCounts(
        steps=len(tokens),
        tokens=sum(tokens),
        accepted=tuple(sum(count > i + 1 for count in tokens) for i in range(num_speculative_tokens)),
    )


def count_by(steps: Iterable[Step], key: Callable[[Step], str], num_speculative_tokens: int) -> dict[str, StepCounts]:
    """One count for each value of `key`, in the order in which they first come."""
    groups: dict[str, list[Step]] = {}
    for step in steps:
        groups.setdefault(key(step), []).append(step)
    return {name: count_steps(group, num_speculative_tokens) for name, group in groups.items()}


def name_bucket(context: int) -> str:
    """The range of powers of two that a context of so many tokens falls into: `0-255`, `256-511`, `512-1023`..."""
    if context < _FIRST_EDGE:
        return f"0-{_FIRST_EDGE - 1}"
    low = 1 << (context.bit_length() - 1)
    return f"{low}-{2 * low - 1}"
