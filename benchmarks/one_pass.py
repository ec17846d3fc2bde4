"""What hidden states cost: captured while generating, beside generation alone and beside generation and extraction.

    python benchmarks/one_pass.py [--target tiny|smollm2|FOLDER] [--prompts 400] [--repeats 3]

Three engines stay open and take turns on the same prompts: vLLM as `generate` runs it without capture, the capturing
one, and the prefill of an extraction. Capture and extraction both encode every sample that ended by itself, check the
first against the contract, and write all to a fresh store in the default format. Starting engines is not in the
figures, though two passes start two. Greedy, so all see the same tokens.

Prints each round, the median ratios by the clock and by the processor (all processes), the share of the second pass,
and the peak memory of this process for a quarter of the prompts and for all. On a CPU a prefill is dear, so the share
of the second pass says nothing about GPUs. Figures are reported, not asserted.

`smollm2` is SmolLM2-135M-Instruct from a package (`trainers/target.py`).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from encoding_stages import watch_encoding
from generate_overhead import Stopwatch
from trainers.target import save_smollm2

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.drafter.config import default_aux_layer_ids
from eagle3_kimi.engines import Generation, GenerationRequest, SamplingOptions
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.vllm import VllmEngine
from eagle3_kimi.hidden_states.capture import CaptureRequest, VllmSource
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.hidden_states.capturing_engine import CapturedGeneration, CapturingVllmEngine
from eagle3_kimi.hidden_states.one_pass import OnePassStore, read_sample
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.target import Target, resolve_target
from eagle3_kimi.tiny.problems import generate_problems

Result = TypeVar("Result")

MAX_MODEL_LEN = 512
QUESTIONS = (
    "What is {a} plus {b}? Answer in one short sentence.",
    "Name {a} animals in one sentence.",
    "Describe a river with {b} stones in one sentence.",
    "Why do people count in tens and not in groups of {a}? Answer in one short sentence.",
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every way is given."""

    target: Target
    prompts: list[list[int]]
    stop_token_ids: tuple[int, ...]
    sampling: SamplingOptions
    aux_layer_ids: tuple[int, ...]

    def part(self, count: int) -> Work:
        return Work(**{**vars(self), "prompts": self.prompts[:count]})


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one way, once."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


class Bench:
    """The three engines and a folder for stores."""

    def __init__(self, target: Target, aux_layer_ids: tuple[int, ...], folder: Path) -> None:
        options = EngineOptions(dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=64)
        layer_ids = tuple(sorted({1, *aux_layer_ids, target.num_layers}))
        self.plain = VllmEngine(target, options)
        self.capturing = CapturingVllmEngine(target, options, layer_ids)
        self.source = VllmSource(target, layer_ids, dtype="float32", max_model_len=MAX_MODEL_LEN)
        self._stores = (folder / f"store-{number}" for number in itertools.count())

    def generate(self, work: Work) -> tuple[Cost, list[Generation]]:
        """Generation alone; the samples that ended by themselves."""
        self.plain._llm.reset_prefix_cache()
        meter = Meter()
        found = list(meter.watch(self.plain.generate(requests(work), work.sampling, work.stop_token_ids)))
        return meter.stop(), [generation for generation in found if generation.finish_reason == "stop"]

    def one_pass(self, work: Work) -> Cost:
        """Generation with capture."""
        meter = Meter()
        with self._open_store(work) as store:
            for generation in meter.watch(self.capturing.generate(requests(work), work.sampling, work.stop_token_ids)):
                if isinstance(generation, CapturedGeneration):
                    store.add(store.encode(sample_of(generation), generation.states))
        return meter.stop()

    def extract(self, work: Work, generations: list[Generation]) -> Cost:
        """The second pass of the two."""
        meter = Meter()
        samples = {generation.request_id: sample_of(generation) for generation in generations}
        by_length = sorted(samples.values(), key=lambda sample: -len(sample.token_ids))
        captures = (CaptureRequest(sample.id, tuple(sample.token_ids.tolist())) for sample in by_length)
        with self._open_store(work) as store:
            for states in meter.watch(self.source.capture(captures)):
                store.add(store.encode(samples[states.id], states))
        return meter.stop()

    def close(self) -> None:
        self.capturing.close()
        self.plain.close()
        self.source.close()

    def _open_store(self, work: Work) -> OnePassStore:
        config = CaptureConfig(
            store=next(self._stores), aux_layer_ids=work.aux_layer_ids, max_shard_bytes=4 << 20, contract_samples=1
        )
        return OnePassStore(
            config, work.target, dtype="float32", temperature=work.sampling.temperature, protocol="benchmark"
        )


class Meter:
    """Clocks, and this process's largest size at any result."""

    def __init__(self) -> None:
        self._process, self._peak = psutil.Process(), 0
        self._watch = Stopwatch()

    def watch(self, results: Iterable[Result]) -> Iterator[Result]:
        for result in results:
            yield result
            self._peak = max(self._peak, self._process.memory_info().rss)

    def stop(self) -> Cost:
        seconds, cpu_seconds, _ = self._watch.stop()
        return Cost(seconds=seconds, cpu_seconds=cpu_seconds, peak_mb=self._peak / 1e6)


def requests(work: Work) -> deque[GenerationRequest]:
    """The prompts as an engine takes them."""
    return deque(
        GenerationRequest(id=f"{number:05d}", prompt_token_ids=prompt, seed=number)
        for number, prompt in enumerate(work.prompts)
    )


def sample_of(generation: Generation) -> Sample:
    """What the stores keep of an answer; its spans do not matter here."""
    length = len(generation.output_token_ids)
    row = {
        "id": generation.request_id,
        "prompt_token_ids": generation.prompt_token_ids,
        "output_token_ids": generation.output_token_ids,
        "spans": [{"kind": "reasoning", "start": 0, "end": length}],
    }
    return read_sample(row, "train")


def make_work(name: str, num_prompts: int, folder: Path) -> Work:
    """The tiny target's own problems; questions in the chat format for any other target."""
    if name == "tiny":
        target = resolve_target("tiny")
        tokenizer = target.load_tokenizer()
        problems = generate_problems(num_prompts, seed=7, kinds=("reverse", "sort"))
        return Work(
            target=target,
            prompts=[render_prompt(tokenizer, problem.messages, preset="tiny-kimi") for problem in problems],
            stop_token_ids=target.load_protocol(tokenizer).markers.stop_token_ids,
            sampling=SamplingOptions(temperature=0.0, max_tokens=200),
            aux_layer_ids=(1, 2, 3),
        )
    if name == "smollm2":
        save_smollm2(folder / name)
        name = str(folder / name)
    target = resolve_target(name)
    tokenizer = target.load_tokenizer()
    texts = [QUESTIONS[n % len(QUESTIONS)].format(a=n // 4 + 2, b=7 * n % 90 + 3) for n in range(num_prompts)]
    return Work(
        target=target,
        prompts=[
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ],
        stop_token_ids=(tokenizer.eos_token_id,),
        sampling=SamplingOptions(temperature=0.0, max_tokens=128),
        aux_layer_ids=default_aux_layer_ids(target.num_layers),
    )


def compare(bench: Bench, work: Work, repeats: int) -> None:
    """Warms every engine up on a quarter of the prompts, then lets them take turns."""
    quarter = work.part(max(16, len(work.prompts) // 4))
    _, generations = bench.generate(quarter)
    bench.extract(quarter, generations)
    small = bench.one_pass(quarter)
    rounds: list[tuple[Cost, Cost, Cost]] = []
    stages = watch_encoding()
    for number in range(repeats):
        captured = bench.one_pass(work) if number % 2 else None  # neither way always comes first
        plain, generations = bench.generate(work)
        extracted = bench.extract(work, generations)
        captured = captured or bench.one_pass(work)
        rounds.append((plain, extracted, captured))
        tokens = sum(len(generation.output_token_ids) for generation in generations)
        print(
            f"{len(generations)} samples, {tokens:,} tokens: generation {plain.seconds:.1f} s, "
            f"extraction {extracted.seconds:.1f} s, one pass {captured.seconds:.1f} s",
            flush=True,
        )

    def median(of: str, *, beside_both: bool) -> float:
        ratios = []
        for plain, extracted, captured in rounds:
            other = getattr(plain, of) + (getattr(extracted, of) if beside_both else 0.0)
            ratios.append(getattr(captured, of) / other)
        return statistics.median(ratios)

    for both, what in ((False, "generation alone"), (True, "generation and extraction")):
        clock, processor = median("seconds", beside_both=both), median("cpu_seconds", beside_both=both)
        print(f"one pass takes {clock:.2f} of {what} by the clock, {processor:.2f} by the processor")
    share = statistics.median(extracted.seconds / (plain.seconds + extracted.seconds) for plain, extracted, _ in rounds)
    print(f"the second pass is {share:.0%} of generation and extraction on this machine")
    encoding = sum(extracted.cpu_seconds + captured.cpu_seconds for _, extracted, captured in rounds)
    print(f"extraction's and one pass's processor time: {stages.show(encoding)}")
    largest = max(captured.peak_mb for _, _, captured in rounds)
    print(
        f"peak memory of this process while capturing: {small.peak_mb:.0f} MB with {len(quarter.prompts)} prompts, "
        f"{largest:.0f} MB with {len(work.prompts)}"
    )


def main() -> None:
    """Parses, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", default="tiny", help="tiny, smollm2, or the folder of a target with a chat template"
    )
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, after one to warm up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = make_work(options.target, options.prompts, folder)
        bench = Bench(work.target, work.aux_layer_ids, folder)
        try:
            compare(bench, work, options.repeats)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
