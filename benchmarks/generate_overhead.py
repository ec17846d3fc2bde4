"""What the builder's way of generating costs beside a bare `LLM.generate` on the same prompts.

    python benchmarks/generate_overhead.py [--prompts 500] [--repeats 5] [--temperature 0]

Both ways drive one vLLM engine, in turns, the prefix cache emptied before each: two engines would differ by more than
what is measured here. The bare way is handed token ids and keeps its outputs. The builder's way is a
whole `GenerationRun`: it reads the prompt file, renders, generates with a seed for each sample, judges every answer on
its token ids, and writes it to a fresh journal. Its canary prompts, once a run whatever its size, are timed apart.

Prints tokens a second of both, by the clock and by the processor (engine process included), the median of the ratios of
neighbouring runs, and the CPU seconds of this process alone: the engine's work is the same both ways, and on a machine
with other work the difference of these is the figure to trust. Figures are reported, not asserted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.engines import Generation, GenerationRequest, SamplingOptions
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.vllm import VllmEngine
from eagle3_kimi.generation import GenerationConfig, GenerationRun
from eagle3_kimi.prompts import load_conversations
from eagle3_kimi.target import resolve_target
from eagle3_kimi.tiny.problems import generate_problems


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run of one way."""

    tokens: int
    """Output tokens of the samples."""
    seconds: float
    cpu_seconds: float
    driver_cpu_seconds: float
    """Of `cpu_seconds`, what this process took beside the engine's: where all that differs is done."""
    preflight_seconds: float = 0.0
    """Not in `seconds`."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_rate(self) -> float:
        return self.tokens / self.cpu_seconds


class Stopwatch:
    """Seconds by the clock, of all processors, and of this process."""

    def __init__(self) -> None:
        self._begun = _read_clocks()

    def stop(self) -> tuple[float, ...]:
        return tuple(now - begun for now, begun in zip(_read_clocks(), self._begun, strict=True))


def _read_clocks() -> tuple[float, ...]:
    engine = sum(sum(process.cpu_times()[:2]) for process in psutil.Process().children(recursive=True))
    driver = time.process_time()
    return time.perf_counter(), engine + driver, driver


class SharedEngine:
    """The one engine, as a run sees it: counts tokens, times the canaries, stays open when the run closes it."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self.info = engine, engine.info
        self.preflight = (0.0, 0.0, 0.0)
        self.tokens = 0

    def generate(
        self, queue: deque[GenerationRequest], sampling: SamplingOptions, stop_token_ids: tuple[int, ...]
    ) -> Iterator[Generation]:
        canaries, watch = queue[0].id.startswith("canary"), Stopwatch()
        for generation in self._engine.generate(queue, sampling, stop_token_ids):
            self.tokens += 0 if canaries else len(generation.output_token_ids)
            yield generation
        if canaries:
            self.preflight = watch.stop()

    def close(self) -> None:
        """The engine is needed again."""


def run_bare(
    llm: Any, prompts: list[list[int]], sampling: SamplingOptions, stop_token_ids: tuple[int, ...], *, decode: bool
) -> Figures:
    """`LLM.generate` on rendered prompts."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(stop_token_ids),
        detokenize=decode,
    )
    llm.reset_prefix_cache()
    watch = Stopwatch()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds, cpu_seconds, driver = watch.stop()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Figures(tokens=tokens, seconds=seconds, cpu_seconds=cpu_seconds, driver_cpu_seconds=driver)


def run_builder(engine: VllmEngine, config: GenerationConfig, prompts: Path) -> Figures:
    """A whole run into a fresh journal."""
    shared = SharedEngine(engine)
    run = GenerationRun(config, open_engine=lambda *_: shared)
    engine._llm.reset_prefix_cache()
    watch = Stopwatch()
    report = run.run(load_conversations([prompts]))
    seconds, cpu_seconds, driver = watch.stop()
    assert report.generated == report.planned, report
    return Figures(
        tokens=shared.tokens,
        seconds=seconds - shared.preflight[0],
        cpu_seconds=cpu_seconds - shared.preflight[1],
        driver_cpu_seconds=driver - shared.preflight[2],
        preflight_seconds=shared.preflight[0],
    )


def compare(num_prompts: int, repeats: int, sampling: SamplingOptions, *, decode: bool, folder: Path) -> None:
    """Warms both ways up, then alternates, and prints every pair and the medians."""
    target = resolve_target("tiny")
    tokenizer = target.load_tokenizer()
    protocol = target.load_protocol(tokenizer)
    problems = list(generate_problems(num_prompts, seed=7, kinds=("reverse", "sort")))
    file = folder / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"id": str(i), "messages": problem.messages}) + "\n" for i, problem in enumerate(problems))
    )
    prompts = [render_prompt(tokenizer, problem.messages, preset=protocol.preset) for problem in problems]
    engine = VllmEngine(target, EngineOptions(max_model_len=1024, dtype="float32"))
    pairs: list[tuple[Figures, Figures]] = []
    try:
        for number in range(repeats + 1):
            config = GenerationConfig(target="tiny", sampling=sampling, journal_dir=folder / f"journals-{number}")

            def bare() -> Figures:
                return run_bare(engine._llm, prompts, sampling, protocol.markers.stop_token_ids, decode=decode)

            def builder(config: GenerationConfig = config) -> Figures:
                return run_builder(engine, config, file)

            if number % 2:  # neither way always comes first
                built, plain = builder(), bare()
            else:
                plain, built = bare(), builder()
            if number:
                pairs.append((plain, built))
                print(_describe(plain, built), flush=True)
    finally:
        engine.close()
    by_clock = statistics.median(built.rate / plain.rate for plain, built in pairs)
    by_cpu = statistics.median(built.cpu_rate / plain.cpu_rate for plain, built in pairs)
    preflight = statistics.median(built.preflight_seconds for _, built in pairs)
    print(
        f"median ratio: {by_clock:.3f} by the clock, {by_cpu:.3f} by the processor; preflight {preflight:.2f} s a run"
    )
    own = [(built.driver_cpu_seconds - plain.driver_cpu_seconds) / plain.cpu_seconds for plain, built in pairs]
    print(f"the run's own work takes {statistics.median(own):.1%} of the bare way's CPU time")


def _describe(plain: Figures, built: Figures) -> str:
    return (
        f"bare {plain.rate:,.0f} tokens/s ({plain.cpu_rate:,.0f} a CPU second), "
        f"builder {built.rate:,.0f} ({built.cpu_rate:,.0f}): "
        f"{built.rate / plain.rate:.3f} ({built.cpu_rate / plain.cpu_rate:.3f}) of {built.tokens:,} tokens; "
        f"driver {plain.driver_cpu_seconds:.2f} and {built.driver_cpu_seconds:.2f} CPU seconds"
    )


def main() -> None:
    """Parses, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs, after one to warm up")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy: both ways make the same tokens")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--ids-only", action="store_true", help="the bare way decodes no text, as the engine of a run")
    options = parser.parse_args()
    sampling = SamplingOptions(temperature=options.temperature, max_tokens=options.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        compare(options.prompts, options.repeats, sampling, decode=not options.ids_only, folder=Path(folder))


if __name__ == "__main__":
    main()
