"""Runs of one engine in a process of its own: `python -m eagle3_kimi.evaluation.worker REQUESTS.json REPORTS.json`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.engines import check_engine_available
from eagle3_kimi.errors import Eagle3KimiError, TargetError
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, AcceptanceRequest, Divergence
from eagle3_kimi.evaluation.child_process import ERROR_PREFIX
from eagle3_kimi.evaluation.dialogues import Answers, Decoding, ask
from eagle3_kimi.evaluation.steps import label_tokens
from eagle3_kimi.protocol import ReasoningProtocol, SpanKind
from eagle3_kimi.target import Target, resolve_target


class Decoder(Protocol):
    """An engine that decodes with a drafter, or plainly, and counts what it accepts."""

    name: str
    version: str
    device: str

    def decode(self, prompts: Sequence[Sequence[int]], request: AcceptanceRequest) -> list[Decoding]:
        """Turns that follow the prompts, in their order."""
        ...

    def take_counters(self) -> tuple[int, tuple[int, ...]]:
        """Drafts since the last call, and how many were accepted up to each position; 0 and () without a drafter."""
        ...

    def find_best_two(self, texts: Sequence[Sequence[int]]) -> list[tuple[tuple[int, int], float]]:
        """The target's two best next tokens after each text, and how far apart their logits are."""
        ...

    def close(self) -> None:
        """Gives back memory and processes."""
        ...


def run(requests: Sequence[AcceptanceRequest]) -> list[AcceptanceReport]:
    """Checks the drafter against the target and decodes with the engine that was asked for."""
    first = requests[0]
    check_engine_available(first.engine)
    target = resolve_target(first.target, revision=first.target_revision, trust_remote_code=first.trust_remote_code)
    if first.drafter is not None:
        from eagle3_kimi.drafter.export_check import check_export
        from eagle3_kimi.drafter.loading import ENGINES

        check_export(Path(first.drafter), target, engines=("vllm",) if first.engine == "vllm" else ENGINES)
    decoder = _open_decoder(target, first)
    tokenizer = target.load_tokenizer()
    asks = any(request.questions for request in requests)
    protocol = target.load_protocol(tokenizer) if asks else None
    reports = [measure(decoder, request, tokenizer, protocol) for request in requests]
    decoder.close()
    return reports


def _open_decoder(target: Target, request: AcceptanceRequest) -> Decoder:
    if request.engine == "vllm":
        from eagle3_kimi.evaluation.served import VllmDecoder

        return VllmDecoder(target, request)
    from eagle3_kimi.evaluation.simulated import SimulatedDecoder

    return SimulatedDecoder(target, request)


def measure(
    decoder: Decoder, request: AcceptanceRequest, tokenizer: Any, protocol: ReasoningProtocol | None
) -> AcceptanceReport:
    """Decodes the request's prompts, or asks its questions (by `protocol`), and reads what the engine counted."""
    seconds = 0.0

    def decode(prompts: Sequence[Sequence[int]]) -> list[Decoding]:
        nonlocal seconds
        started = time.perf_counter()
        decodings = decoder.decode(prompts, request)
        seconds += time.perf_counter() - started
        return decodings

    decoder.take_counters()
    if request.questions:
        assert protocol is not None  # `run` has loaded it
        answers = _ask(request, tokenizer, protocol, decode)
    else:
        answers = Answers(prompts=[list(ids) for ids in request.prompts], decodings=decode(request.prompts))
    drafts, accepted = decoder.take_counters()
    return AcceptanceReport(
        engine=decoder.name,
        engine_version=decoder.version,
        device=decoder.device,
        num_speculative_tokens=len(accepted),
        num_drafts=drafts,
        accepted_per_position=accepted,
        output_token_ids=tuple(decoding.token_ids for decoding in answers.decodings),
        seconds=seconds,
        tokens_per_step=tuple(decoding.tokens_per_step for decoding in answers.decodings),
        prompt_token_ids=tuple(map(tuple, answers.prompts)),
        question_indices=tuple(answers.question_indices),
        too_long=answers.too_long,
        unanswered=answers.unanswered,
        divergences=_find_divergences(decoder, request, answers),
    )


def _ask(request: AcceptanceRequest, tokenizer: Any, protocol: ReasoningProtocol, decode: Any) -> Answers:
    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        ids = render_prompt(tokenizer, messages, tools=tools, thinking=request.thinking, preset=protocol.preset)
        if not request.thinking and protocol.prompt_state(ids) == "opened":
            raise TargetError(
                f"this target's template opens the thoughts although `{protocol.preset.thinking_variable}` is false: "
                "its thinking cannot be switched off; measure with thinking on"
            )
        return ids

    def read_content(prompt: list[int], decoding: Decoding) -> str:
        ids = decoding.token_ids
        if ids[-1] not in protocol.markers.stop_token_ids:
            return ""  # cut: there is no answer to follow up
        kinds, marked = label_tokens(protocol, prompt, ids), set[int]()
        for marker in protocol.markers.find(ids):
            marked.update(range(marker.start, marker.end))
        kept = [i for i, kind in enumerate(kinds) if kind is SpanKind.ANSWER and i not in marked]
        return protocol.decode([ids[i] for i in kept])

    return ask(
        request.questions,
        render=render,
        decode=decode,
        read_content=read_content,
        max_prompt_tokens=request.max_model_len - 1,
    )


def _find_divergences(decoder: Decoder, request: AcceptanceRequest, answers: Answers) -> tuple[Divergence, ...]:
    differing = []
    for index, plain in enumerate(request.reference):
        drafted = answers.decodings[index].token_ids
        if drafted == plain:
            continue
        position = next((i for i, pair in enumerate(zip(plain, drafted, strict=False)) if pair[0] != pair[1]), None)
        if position is not None:  # else one of them was cut earlier: nothing that was written differs
            differing.append((index, position, plain[position], drafted[position]))
    texts = [[*answers.prompts[index], *request.reference[index][:position]] for index, position, _, _ in differing]
    found = decoder.find_best_two(texts) if texts else []
    return tuple(
        Divergence(
            prompt=index,
            position=position,
            plain_token=plain_token,
            drafted_token=drafted_token,
            best_two=best_two,
            logit_gap=gap,
        )
        for (index, position, plain_token, drafted_token), (best_two, gap) in zip(differing, found, strict=True)
    )


def main(requests: str, reports: str) -> None:
    """Reads the requests, writes the reports; a foreseen failure is one line on standard error."""
    try:
        values = json.loads(Path(requests).read_text(encoding="utf-8"))
        made = run([AcceptanceRequest.from_json(value) for value in values])
        Path(reports).write_text(json.dumps([asdict(report) for report in made]), encoding="utf-8")
    except Eagle3KimiError as error:
        raise SystemExit(ERROR_PREFIX + " ".join(str(error).split())) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
