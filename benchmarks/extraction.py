"""What extraction costs beside prefill alone: tokens a second of both, and the memory of the process that writes.

    python benchmarks/extraction.py [--target tiny|smollm2|FOLDER] [--samples 600] [--turns 1] [--repeats 5]

Two engines with the same arguments stay open, the one of capture and extraction and one without our connector, and take
turns on the same samples, in the same order:

    prefill     vLLM without our connector, one new token a sample, nothing kept; in a process of its own, since a
                connector belongs to all engines of a process, and inside it as extraction runs its engine
    capture     states captured by our connector, and dropped
    extraction  states captured, the first checked against the contract, encoded, written to a fresh store

Samples are greedy answers of the target. Starting engines is not in the figures. Prints each round, the median ratios
by the clock, where extraction's own time goes, and its peak memory for a quarter of the samples and for all. Figures
are reported, not asserted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from capture_work import (
    MAX_MODEL_LEN,
    STEP_TOKENS,
    Work,
    extract,
    make_work,
    open_extraction,
    row_of,
    show_ratios,
)
from encoding_stages import watch_encoding

from eagle3_kimi.hidden_states.capture import CaptureRequest
from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.samples import SampleRef, plan_shares


class Prefill:
    """The engine of an extraction without what captures, in a process that runs it inside itself."""

    def __init__(self, work: Work) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve_prefill, args=(other, work), daemon=True)
        self._process.start()

    def generate_rows(self) -> list[dict[str, Any]]:
        """Answers that ended by themselves."""
        return self._ask("generate")

    def run(self, extraction: Extraction, refs: list[SampleRef]) -> float:
        """Seconds that the samples' tokens take, in the order in which extraction sends them."""
        (share,) = plan_shares(refs, 1, window=extraction.options.window)
        return self._ask([extraction.reader.read(ref).token_ids.tolist()[:-1] for ref in share])

    def _ask(self, question: Any) -> Any:
        self._pipe.send(question)
        return self._pipe.recv()


def capture(extraction: Extraction, refs: list[SampleRef]) -> float:
    """Seconds that the samples' states take."""
    (share,) = plan_shares(refs, 1, window=extraction.options.window)
    assert extraction._source is not None  # it has extracted some already
    started = time.perf_counter()
    wanted = (CaptureRequest(ref.id, tuple(extraction.reader.read(ref).token_ids.tolist())) for ref in share)
    deque(extraction._source.capture(wanted), maxlen=0)
    return time.perf_counter() - started


def _serve_prefill(pipe: Connection, work: Work) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in work.target.config else {}
    engine = LLM(
        model=str(work.target.path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        **arguments,
    )

    def run(prompts: list[list[int]], sampling: SamplingParams) -> list[Any]:
        return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    greedy = {"temperature": 0.0, "detokenize": False}
    while True:
        question = pipe.recv()
        if question == "generate":
            stop = list(work.stop_token_ids)
            results = run(work.prompts, SamplingParams(max_tokens=200, stop_token_ids=stop, **greedy))
            pipe.send(
                [
                    row_of(f"{number:05d}", list(result.prompt_token_ids), list(result.outputs[0].token_ids))
                    for number, result in enumerate(results)
                    if result.outputs[0].finish_reason == "stop"
                ]
            )
        else:
            started = time.perf_counter()
            run(question, SamplingParams(max_tokens=1, **greedy))
            pipe.send(time.perf_counter() - started)


def main() -> None:
    """Parses, generates, lets both take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", default="tiny", help="tiny, smollm2, or the folder of a target with a chat template"
    )
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--turns", type=int, default=1, help="of a prompt: more make samples longer")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one to warm up")
    parser.add_argument("--aux-dtype", default="fp8")
    parser.add_argument("--targets", default="topk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = make_work(options.target, options.samples, folder, turns=options.turns)
        prefill = Prefill(work)
        rows = prefill.generate_rows()
        extraction = open_extraction(
            work, rows, folder / "samples", aux_dtype=options.aux_dtype, targets=options.targets
        )
        refs = extraction.refs
        quarter = extract(extraction, refs[: len(refs) // 4], folder / "quarter")
        prefill.run(extraction, refs)
        tokens = sum(ref.num_tokens - 1 for ref in refs)
        rounds, stages = [], watch_encoding()
        for number in range(options.repeats):
            first = extract(extraction, refs, folder / f"store-{number}") if number % 2 else None
            alone = prefill.run(extraction, refs)
            whole = first or extract(extraction, refs, folder / f"store-{number}")
            captured = capture(extraction, refs)
            rounds.append((alone, captured, whole))
            print(
                f"{len(refs)} samples, {tokens:,} tokens: prefill {tokens / alone:,.0f} tokens/s, "
                f"capture {tokens / captured:,.0f}, extraction {tokens / whole.seconds:,.0f}",
                flush=True,
            )
        extraction.close()
    captures = [alone / captured for alone, captured, _ in rounds]
    wholes = [alone / whole.seconds for alone, _, whole in rounds]
    print(f"capture has {show_ratios(captures)}, extraction {show_ratios(wholes)} of prefill's tokens a second")
    own = sum(whole.own_cpu_seconds for _, _, whole in rounds)
    print(f"extraction's processor time: {stages.show(own)}")
    print(f"peak memory: {quarter.peak_mb:.0f} MB for a quarter of the samples, {rounds[-1][2].peak_mb:.0f} MB for all")


if __name__ == "__main__":
    main()
