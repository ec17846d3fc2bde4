"""Reports of engines -> the figures of acceptance.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_kimi.evaluation.acceptance import AcceptanceReport, Divergence
from eagle3_kimi.evaluation.dialogues import Question
from eagle3_kimi.evaluation.steps import Step, StepCounts, count_by, count_steps, list_steps, name_bucket
from eagle3_kimi.protocol import ReasoningProtocol, SpanKind

_MOST_DIVERGENCES = 20


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Acceptance without a serving engine."""

    source: str
    """What simulated, over which text."""
    acceptance_per_position: tuple[float, ...]


def describe_plain(report: AcceptanceReport, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """What plain decoding did: the text that drafted runs are compared with, and its speed."""
    tokens = sum(map(len, report.output_token_ids))
    return {
        "turns": len(report.output_token_ids),
        "cut_turns": sum(ids[-1] not in stop_token_ids for ids in report.output_token_ids),
        "too_long_prompts": report.too_long,
        "questions_ended_early": report.unanswered,
        "tokens": tokens,
        "seconds": round(report.seconds, 3),
        "tokens_per_second": _rate(report),
    }


def describe_drafted(
    report: AcceptanceReport,
    plain: AcceptanceReport,
    questions: Sequence[Question],
    protocol: ReasoningProtocol,
    *,
    greedy: bool,
    simulated: Simulation | None = None,
) -> dict[str, Any]:
    """What one drafted run did.

    Args:
        report: of the drafted run, over the plain run's prompts.
        plain: of the plain run.
        questions: that the plain run asked.
        protocol: tells reasoning, answer and tool calls apart.
        greedy: whether the text must be the plain run's.
        simulated: what a simulation says of this draft length.
    """
    length = report.num_speculative_tokens
    turns = zip(plain.prompt_token_ids, report.decodings, strict=True)
    steps = [list_steps(protocol, prompt, decoding) for prompt, decoding in turns]
    flat = [step for turn in steps for step in turn]
    order = {str(kind): place for place, kind in enumerate(SpanKind)}
    spans = count_by(flat, lambda step: str(step.kind), length)
    asked = [questions[index] for index in plain.question_indices]
    return {
        "num_speculative_tokens": length,
        "acceptance_length": round(report.acceptance_length, 4),
        "acceptance_per_position": _shares(report.acceptance_per_position),
        "num_drafts": report.num_drafts,
        "delivered": _describe(count_steps(flat, length)),
        "by_span": {name: _describe(spans[name]) for name in sorted(spans, key=order.__getitem__)},
        "by_context_length": _by_context(flat, length),
        "by_benchmark": _by_question(asked, steps, length, lambda question: question.benchmark),
        "by_category": _by_question(
            asked, steps, length, lambda question: question.category and f"{question.benchmark}/{question.category}"
        ),
        "tokens": sum(map(len, report.output_token_ids)),
        "seconds": round(report.seconds, 3),
        "tokens_per_second": _rate(report),
        "speed_up": round(_rate(report) / _rate(plain), 3),
        "lossless": _describe_losslessness(report, plain, protocol) if greedy else None,
        "simulated": None if simulated is None else _describe_simulation(simulated, report),
    }


def _describe_simulation(simulated: Simulation, report: AcceptanceReport) -> dict[str, Any]:
    length = 1.0 + sum(simulated.acceptance_per_position)
    return {
        "source": simulated.source,
        "acceptance_length": round(length, 4),
        "acceptance_per_position": _shares(simulated.acceptance_per_position),
        "gap": round(length - report.acceptance_length, 4),
    }


def _by_context(steps: Sequence[Step], length: int) -> dict[str, Any]:
    counts = count_by(sorted(steps, key=lambda step: step.context), lambda step: name_bucket(step.context), length)
    return {name: _describe(count) for name, count in counts.items()}


def _by_question(
    asked: Sequence[Question], steps: Sequence[Sequence[Step]], length: int, name_of: Callable[[Question], str]
) -> dict[str, Any]:
    groups: dict[str, list[Step]] = {}
    for question, turn in zip(asked, steps, strict=True):
        groups.setdefault(name_of(question), []).extend(turn)
    return {name: _describe(count_steps(group, length)) for name, group in groups.items() if name}


def _describe(counts: StepCounts) -> dict[str, Any]:
    return {
        "acceptance_length": round(counts.acceptance_length, 4),
        "acceptance_per_position": _shares(counts.acceptance_per_position),
        "steps": counts.steps,
        "tokens": counts.tokens,
    }


def _describe_losslessness(
    report: AcceptanceReport, plain: AcceptanceReport, protocol: ReasoningProtocol
) -> dict[str, Any]:
    pairs = list(zip(report.output_token_ids, plain.output_token_ids, strict=True))
    return {
        "turns": len(pairs),
        "identical_turns": sum(ours == theirs for ours, theirs in pairs),
        "largest_logit_gap": max((divergence.logit_gap for divergence in report.divergences), default=None),
        "divergences": [_describe_divergence(d, protocol) for d in report.divergences[:_MOST_DIVERGENCES]],
    }


def _describe_divergence(divergence: Divergence, protocol: ReasoningProtocol) -> dict[str, Any]:
    return {
        "turn": divergence.prompt,
        "position": divergence.position,
        "plain": {"token": divergence.plain_token, "text": protocol.show([divergence.plain_token])},
        "drafted": {"token": divergence.drafted_token, "text": protocol.show([divergence.drafted_token])},
        "two_best_tokens": list(divergence.best_two),
        "logit_gap": round(divergence.logit_gap, 6),
    }


def _rate(report: AcceptanceReport) -> float:
    return round(sum(map(len, report.output_token_ids)) / max(report.seconds, 1e-9), 3)


def _shares(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]
