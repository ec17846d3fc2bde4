"""The engines of an evaluation, one at a time, each in a process of its own.

    plain engine            asks the questions, thinking on and off, greedy and sampled -> prompts, text, speed
    an engine for each k    the same prompts                                            -> steps, counters, speed
    transformers            the same prompts, greedy, for each k                        -> the simulated figures

What an engine said is kept in a folder until the end, so an interrupted evaluation goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eagle3_kimi.errors import DataError
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, AcceptanceRequest, measure_together
from eagle3_kimi.evaluation.dialogues import Question
from eagle3_kimi.evaluation.settings import EvaluationConfig, Sampling
from eagle3_kimi.prompts.files import digest_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineRuns:
    """Reports, by the index of the sampling and the draft length k."""

    plain: Sequence[AcceptanceReport]
    drafted: Mapping[tuple[int, int], AcceptanceReport]
    simulated: Mapping[tuple[int, int], AcceptanceReport]
    """Of greedy samplings; empty where nothing is simulated."""


def run_engines(
    config: EvaluationConfig,
    questions: tuple[Question, ...],
    samplings: Sequence[Sampling],
    *,
    simulate: bool,
    kept: Path,
) -> EngineRuns:
    """Runs every engine that `kept` does not hold the reports of.

    Raises:
        DataError: every prompt is too long.
        RunStopped: an engine could not start or failed; says why in one sentence.
    """
    bases = [_build_request(config, sampling) for sampling in samplings]
    plain = _measure([replace(base, questions=questions) for base in bases], kept, "plain decoding")
    if not plain[0].prompt_token_ids:
        raise DataError(f"every prompt is longer than {config.max_model_len - 1} tokens; raise --max-model-len")
    drafting = {
        (index, length): replace(
            base,
            drafter=str(config.drafter.resolve()),
            num_speculative_tokens=length,
            prompts=report.prompt_token_ids,
            reference=() if base.temperature else report.output_token_ids,
        )
        for length in config.num_speculative_tokens
        for index, (base, report) in enumerate(zip(bases, plain, strict=True))
    }
    drafted: dict[tuple[int, int], AcceptanceReport] = {}
    for length in config.num_speculative_tokens:
        requests = {key: request for key, request in drafting.items() if key[1] == length}
        reports = _measure(list(requests.values()), kept, f"the drafter with k = {length}")
        drafted.update(zip(requests, reports, strict=True))
    simulated: dict[tuple[int, int], AcceptanceReport] = {}
    greedy = {key: request for key, request in drafting.items() if not request.temperature}
    if simulate and greedy:
        requests = {key: replace(request, engine="transformers", reference=()) for key, request in greedy.items()}
        reports = _measure(list(requests.values()), kept, "the simulation")
        simulated.update(zip(requests, reports, strict=True))
    return EngineRuns(plain=plain, drafted=drafted, simulated=simulated)


def _build_request(config: EvaluationConfig, sampling: Sampling) -> AcceptanceRequest:
    return AcceptanceRequest(
        target=str(config.target.path),
        target_revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
        engine=config.engine,
        thinking=sampling.thinking,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=config.max_tokens,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tensor_parallel_size,
        dtype=config.dtype,
        seed=config.seed,
    )


def _measure(requests: Sequence[AcceptanceRequest], kept: Path, what: str) -> list[AcceptanceReport]:
    """Reports of one engine: those of an interrupted evaluation, or made now."""
    values = [asdict(request) for request in requests]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for drafter in {request.drafter for request in requests if request.drafter is not None}:
        digest.update(digest_of(Path(drafter) / "model.safetensors").encode())
    file = kept / f"{digest.hexdigest()[:16]}.json"
    if file.is_file():
        logger.info("%s: reused from the interrupted evaluation", what)
        return [AcceptanceReport.from_json(value) for value in json.loads(file.read_text(encoding="utf-8"))]
    logger.info("%s: starting %s", what, requests[0].engine)
    reports = measure_together(requests, log=file.with_suffix(".log"))
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps([asdict(report) for report in reports]), encoding="utf-8")
    temporary.replace(file)
    return reports
