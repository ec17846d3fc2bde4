"""One evaluation: plain decoding, then the drafter at each draft length, one engine at a time, then acceptance.json.

    plain engine          asks the questions, thinking on and off, greedy and sampled -> prompts, text, speed
    engine with k         the same prompts                                            -> steps, counters, speed
    transformers, k       the same prompts, greedy                                    -> the simulated figure

Each finished engine is kept in `.evaluation/` until the end, so an interrupted evaluation goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import DataError
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, AcceptanceRequest, measure_together
from eagle3_kimi.evaluation.benchmarks import Benchmark, load_benchmark
from eagle3_kimi.evaluation.figures import Simulation, describe_drafted, describe_plain
from eagle3_kimi.evaluation.settings import EvaluationConfig, Sampling, list_samplings
from eagle3_kimi.prompts.files import digest_of
from eagle3_kimi.protocol import ReasoningProtocol
from eagle3_kimi.target import Target

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
ACCEPTANCE = "acceptance.json"
_DEFINITIONS = {
    "acceptance_length": "mean tokens of one target forward, bonus token included, by the engine's counters",
    "acceptance_per_position": "share of drafts whose proposals up to this one were all accepted",
    "delivered": "the same from the tokens that each engine step added; proposals behind an end of turn do not count",
    "by_span": "delivered, a step belonging to the span of its first token",
    "by_context_length": "delivered, by the tokens before a step: prompt and turn so far",
    "speed_up": "tokens a second, drafted over plain",
}
_TRAINING_KEYS = ("steps", "supervised_tokens", "ttt_steps", "evaluated_on", "acceptance", "draft_vocab_coverage")
_SIMULATED_MAX_BYTES = 8 << 30
"""Larger targets are not loaded a second time for the simulation unless asked for."""


def evaluate_drafter(config: EvaluationConfig) -> dict[str, Any]:
    """Measures, writes `acceptance.json` into the output folder, and returns its content.

    Raises:
        UsageError: a file is missing or of a kind that is not read.
        DataError: questions of no known shape; every prompt is too long.
        RunStopped: an engine could not start or failed; says why in one sentence.
    """
    benchmarks = [load_benchmark(file, limit=config.limit) for file in config.prompts]
    questions = tuple(question for benchmark in benchmarks for question in benchmark.questions)
    protocol = config.target.load_protocol(config.target.load_tokenizer())
    samplings = list_samplings(config, protocol.preset.name)
    kept = config.output / ".evaluation"
    kept.mkdir(parents=True, exist_ok=True)
    base, training = _base_request(config), _read_training(config.drafter)

    asking = [replace(_sampled(base, sampling), questions=questions) for sampling in samplings]
    plain = _measure(asking, kept, "plain decoding")
    if not plain[0].prompt_token_ids:
        raise DataError(f"every prompt is longer than {config.max_model_len - 1} tokens; raise --max-model-len")
    greedy = [index for index, sampling in enumerate(samplings) if not sampling.temperature]
    simulate, why_not = _decide_simulation(config)
    results: list[dict[str, Any]] = [
        {**asdict(sampling), "plain": describe_plain(report, protocol.markers.stop_token_ids), "drafted": []}
        for sampling, report in zip(samplings, plain, strict=True)
    ]
    served = plain[0]
    for length in config.num_speculative_tokens:
        drafting = [_drafted(base, s, p, config.drafter, length) for s, p in zip(samplings, plain, strict=True)]
        reports = _measure(drafting, kept, f"the drafter with k = {length}")
        trained = _read_training_simulation(training, length)
        simulated = {index: trained for index in greedy if samplings[index].thinking}
        if simulate and greedy:
            simulating = [replace(drafting[index], engine="transformers", reference=()) for index in greedy]
            made = _measure(simulating, kept, f"the simulation of k = {length}")
            simulated = {index: _simulation_of(report) for index, report in zip(greedy, made, strict=True)}
        served = reports[0]
        for index, report in enumerate(reports):
            figures = describe_drafted(
                report, plain[index], questions, protocol, greedy=index in greedy, simulated=simulated.get(index)
            )
            results[index]["drafted"].append(figures)
    result = {
        "schema_version": SCHEMA_VERSION,
        "definitions": _DEFINITIONS,
        "drafter": {"name": config.drafter.name, "sha256": digest_of(config.drafter / "model.safetensors")},
        "target": {"name": config.target.name, "revision": config.target.revision},
        "engine": {"name": served.engine, "version": served.engine_version, "device": served.device},
        "settings": _describe_settings(config, protocol, why_not),
        "training": training,
        "benchmarks": [_describe_benchmark(benchmark) for benchmark in benchmarks],
        "results": results,
    }
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    temporary = config.output / f".{ACCEPTANCE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(config.output / ACCEPTANCE)
    shutil.rmtree(kept)
    return result


def _base_request(config: EvaluationConfig) -> AcceptanceRequest:
    return AcceptanceRequest(
        target=str(config.target.path),
        target_revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
        engine=config.engine,
        max_tokens=config.max_tokens,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tensor_parallel_size,
        dtype=config.dtype,
        seed=config.seed,
    )


def _sampled(base: AcceptanceRequest, sampling: Sampling) -> AcceptanceRequest:
    return replace(base, thinking=sampling.thinking, temperature=sampling.temperature, top_p=sampling.top_p)


def _drafted(
    base: AcceptanceRequest, sampling: Sampling, plain: AcceptanceReport, drafter: Path, length: int
) -> AcceptanceRequest:
    return replace(
        _sampled(base, sampling),
        drafter=str(drafter.resolve()),
        num_speculative_tokens=length,
        prompts=plain.prompt_token_ids,
        reference=() if sampling.temperature else plain.output_token_ids,
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


def _decide_simulation(config: EvaluationConfig) -> tuple[bool, str]:
    """Whether to simulate, and why not."""
    if config.engine == "transformers":
        return False, "the whole evaluation is the simulation"
    if config.simulate is not None:
        return config.simulate, "" if config.simulate else "not asked for"
    size = sum(file.stat().st_size for file in config.target.path.glob("*.safetensors"))
    if size <= _SIMULATED_MAX_BYTES:
        return True, ""
    return False, f"the target's weights take {size / 1e9:.0f} GB; --simulate loads them all the same"


def _describe_settings(config: EvaluationConfig, protocol: ReasoningProtocol, why_not: str) -> dict[str, Any]:
    return {
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_num_seqs,
        "max_tokens": config.max_tokens,
        "max_model_len": config.max_model_len,
        "seed": config.seed,
        "stop_token_ids": list(protocol.markers.stop_token_ids),
        "prefix_caching": False,
        "warm_up": "8 tokens before the clock starts",
        "chat_template_sha256": _digest_template(config.target),
        "protocol": protocol.preset.name,
        "not_simulated_because": why_not or None,
    }


def _digest_template(target: Target) -> str:
    return hashlib.sha256(str(target.load_tokenizer().chat_template).encode()).hexdigest()


def _describe_benchmark(benchmark: Benchmark) -> dict[str, Any]:
    values = asdict(replace(benchmark, questions=()))
    return {**values, "questions": len(benchmark.questions)}


def _read_training(drafter: Path) -> dict[str, Any] | None:
    """What the trainer said of the drafter, where its run folder still holds it."""
    file = drafter.parent / "training.json"
    if not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    return {key: values[key] for key in _TRAINING_KEYS if key in values}


def _read_training_simulation(training: dict[str, Any] | None, length: int) -> Simulation | None:
    """The trainer's estimate for a draft length, from its own evaluation: other text, every position a start."""
    shares = (training or {}).get("acceptance", ())
    if training is None or len(shares) < length:
        return None
    source = f"training, on its {training.get('evaluated_on', 'own')} samples"
    return Simulation(source=source, acceptance_per_position=tuple(shares[:length]))


def _simulation_of(report: AcceptanceReport) -> Simulation:
    return Simulation(
        source=f"{report.engine} {report.engine_version}, the same prompts",
        acceptance_per_position=report.acceptance_per_position,
    )
