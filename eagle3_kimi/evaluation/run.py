"""One evaluation: questions in, acceptance.json out."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle3_kimi.evaluation.acceptance import AcceptanceReport
from eagle3_kimi.evaluation.benchmarks import Benchmark, load_benchmark
from eagle3_kimi.evaluation.engine_runs import run_engines
from eagle3_kimi.evaluation.figures import Simulation, describe_drafted, describe_plain
from eagle3_kimi.evaluation.settings import EvaluationConfig, Sampling, list_samplings
from eagle3_kimi.prompts.files import digest_of
from eagle3_kimi.protocol import ReasoningProtocol
from eagle3_kimi.target import Target

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
    simulate, why_not = _decide_simulation(config)
    kept = config.output / ".evaluation"
    kept.mkdir(parents=True, exist_ok=True)
    runs = run_engines(config, questions, samplings, simulate=simulate, kept=kept)
    training, served = _read_training(config.drafter), next(iter(runs.drafted.values()))
    result = {
        "schema_version": SCHEMA_VERSION,
        "definitions": _DEFINITIONS,
        "drafter": {"name": config.drafter.name, "sha256": digest_of(config.drafter / "model.safetensors")},
        "target": {"name": config.target.name, "revision": config.target.revision},
        "engine": {"name": served.engine, "version": served.engine_version, "device": served.device},
        "settings": _describe_settings(config, protocol, why_not),
        "training": training,
        "benchmarks": [_describe_benchmark(benchmark) for benchmark in benchmarks],
        "results": [
            {
                **asdict(sampling),
                "plain": describe_plain(runs.plain[index], protocol.markers.stop_token_ids),
                "drafted": [
                    describe_drafted(
                        runs.drafted[index, length],
                        runs.plain[index],
                        questions,
                        protocol,
                        greedy=not sampling.temperature,
                        simulated=_find_simulation(runs.simulated.get((index, length)), training, sampling, length),
                    )
                    for length in config.num_speculative_tokens
                ],
            }
            for index, sampling in enumerate(samplings)
        ],
    }
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    temporary = config.output / f".{ACCEPTANCE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(config.output / ACCEPTANCE)
    shutil.rmtree(kept)
    return result


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


def _find_simulation(
    report: AcceptanceReport | None, training: dict[str, Any] | None, sampling: Sampling, length: int
) -> Simulation | None:
    """What transformers said of the same prompts, else the trainer's estimate: other text, every position a start."""
    if report is not None:
        source = f"{report.engine} {report.engine_version}, the same prompts"
        return Simulation(source=source, acceptance_per_position=report.acceptance_per_position)
    shares = (training or {}).get("acceptance", ())
    if training is None or len(shares) < length or sampling.temperature or not sampling.thinking:
        return None
    source = f"training, on its {training.get('evaluated_on', 'own')} samples"
    return Simulation(source=source, acceptance_per_position=tuple(shares[:length]))
