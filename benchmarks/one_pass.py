"""What hidden states cost: captured while generating, beside generation alone and beside generation and extraction.

    python benchmarks/one_pass.py [--target tiny|smollm2|FOLDER] [--prompts 400] [--turns 1] [--repeats 3]

Three engines stay open and take turns on the same prompts: vLLM as `generate` runs it without capture, the capturing
one, and the prefill of an extraction. Capture and extraction write every sample that ended by itself to a fresh store
in the default format, and check the first against the contract. Starting engines is not in the figures, though two
passes start two. Greedy, so all see the same tokens.

Prints each round, the median ratios by the clock, the share of the second pass, and the peak memory of this process for
a quarter of the prompts and for all. On a CPU a prefill is dear, so the share of the second pass says nothing about
GPUs. Figures are reported, not asserted.

`smollm2` is SmolLM2-135M-Instruct from a package (`trainers/target.py`).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from capture_work import MAX_MODEL_LEN, Cost, Meter, Work, extract, make_work, open_extraction, row_of, show_ratios
from encoding_stages import watch_encoding

from eagle3_kimi.engines import Generation, GenerationRequest
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.vllm import VllmEngine
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.hidden_states.capturing_engine import CapturedGeneration, CapturingVllmEngine
from eagle3_kimi.hidden_states.one_pass import OnePassStore, read_sample


class Bench:
    """The three engines and a folder for stores."""

    def __init__(self, work: Work, folder: Path) -> None:
        options = EngineOptions(dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=64)
        layer_ids = tuple(sorted({1, *work.aux_layer_ids, work.target.num_layers}))
        self._work, self._folder = work, folder
        self._stores = (folder / f"store-{number}" for number in itertools.count())
        self.plain = VllmEngine(work.target, options)
        self.capturing = CapturingVllmEngine(work.target, options, layer_ids)
        _, generations = self.generate(work)
        rows = [as_row(generation) for generation in generations]
        self._extraction = open_extraction(work, rows, folder / "samples")

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
                    store.add(read_sample(as_row(generation), "train"), generation.states)
        return meter.stop()

    def extract(self) -> Cost:
        """The second pass of the two, over what ended by itself."""
        return extract(self._extraction, self._extraction.refs, next(self._stores))

    def close(self) -> None:
        self.capturing.close()
        self.plain.close()
        self._extraction.close()

    def _open_store(self, work: Work) -> OnePassStore:
        config = CaptureConfig(
            store=next(self._stores), aux_layer_ids=work.aux_layer_ids, max_shard_bytes=16 << 20, contract_samples=1
        )
        return OnePassStore(
            config, work.target, dtype="float32", temperature=work.sampling.temperature, protocol="benchmark"
        )


def as_row(generation: Generation) -> dict[str, Any]:
    """An answer as the data set keeps it."""
    return row_of(generation.request_id, generation.prompt_token_ids, generation.output_token_ids)


def requests(work: Work) -> deque[GenerationRequest]:
    """The prompts as an engine takes them."""
    return deque(
        GenerationRequest(id=f"{number:05d}", prompt_token_ids=prompt, seed=number)
        for number, prompt in enumerate(work.prompts)
    )


def compare(bench: Bench, work: Work, repeats: int) -> None:
    """Warms every engine up, then lets them take turns."""
    quarter = work.part(max(16, len(work.prompts) // 4))
    bench.extract()
    small = bench.one_pass(quarter)
    rounds: list[tuple[Cost, Cost, Cost]] = []
    stages = watch_encoding()
    for number in range(repeats):
        captured = bench.one_pass(work) if number % 2 else None  # neither way always comes first
        plain, generations = bench.generate(work)
        extracted = bench.extract()
        captured = captured or bench.one_pass(work)
        rounds.append((plain, extracted, captured))
        tokens = sum(len(generation.output_token_ids) for generation in generations)
        print(
            f"{len(generations)} samples, {tokens:,} tokens: generation {plain.seconds:.1f} s, "
            f"extraction {extracted.seconds:.1f} s, one pass {captured.seconds:.1f} s",
            flush=True,
        )
    alone = [captured.seconds / plain.seconds for plain, _, captured in rounds]
    both = [captured.seconds / (plain.seconds + extracted.seconds) for plain, extracted, captured in rounds]
    share = statistics.median(extracted.seconds / (plain.seconds + extracted.seconds) for plain, extracted, _ in rounds)
    print(
        f"one pass takes {show_ratios(alone)} of generation alone, {show_ratios(both)} of generation and extraction; "
        f"the second pass is {share:.0%} of those on this machine"
    )
    own = sum(extracted.own_cpu_seconds + captured.own_cpu_seconds for _, extracted, captured in rounds)
    print(f"processor time of this process in extraction and one pass: {stages.show(own)}")
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
    parser.add_argument(
        "--turns", type=int, default=1, help="of a prompt: more make samples longer, and prefill dearer"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds, after one to warm up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = make_work(options.target, options.prompts, Path(name), turns=options.turns)
        bench = Bench(work, Path(name))
        try:
            compare(bench, work, options.repeats)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
