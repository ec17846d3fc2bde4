"""What extraction costs beside prefill alone: tokens a second of both, and the memory of the process that writes.

    python benchmarks/extraction.py [--target tiny|smollm2|FOLDER] [--samples 600] [--repeats 5]

Two engines with the same arguments stay open and take turns on the same samples, in the same order:

    prefill     vLLM without our connector, in its own process (a connector belongs to all engines of a process), one
                new token a sample, nothing kept
    extraction  states captured, checked against the contract, encoded, written to a fresh store

Samples are greedy answers of the target. Starting engines is not in the figures, nor is the contract of the first
samples, which a run checks once however many follow. Prints each round, the median ratio
by the clock and by the processor, where extraction's own time goes, and its peak memory for a quarter of the samples
and for all. Figures are reported, not asserted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from datasets import Dataset, DatasetDict
from encoding_stages import CONTRACT, watch_encoding
from one_pass import MAX_MODEL_LEN, Cost, Meter, Work, make_work
from vllm import LLM, SamplingParams

from eagle3_kimi.hidden_states.config import CaptureOptions
from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import SampleRef, plan_shares


def open_prefill(work: Work) -> LLM:
    """The engine of an extraction without what captures."""
    arguments: dict[str, Any] = {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in work.target.config else {}
    return LLM(
        model=str(work.target.path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        **arguments,
    )


def generate_rows(engine: LLM, work: Work) -> list[dict[str, Any]]:
    """Answers that ended by themselves."""
    stop = list(work.stop_token_ids)
    sampling = SamplingParams(temperature=0.0, max_tokens=200, stop_token_ids=stop, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    rows = []
    for number, result in enumerate(engine.generate(prompts, sampling, use_tqdm=False)):
        answer = result.outputs[0]
        if answer.finish_reason == "stop":
            output = list(answer.token_ids)
            rows.append(
                {
                    "id": f"{number:05d}",
                    "prompt_token_ids": list(result.prompt_token_ids),
                    "output_token_ids": output,
                    "spans": [{"kind": "reasoning", "start": 0, "end": len(output)}],
                    "provenance": {"temperature": 0.0, "protocol": "benchmark"},
                }
            )
    return rows


def prefill(engine: LLM, extraction: Extraction, refs: list[SampleRef]) -> Cost:
    """The samples' tokens through the engine, as extraction sends them."""
    meter = Meter()
    (share,) = plan_shares(refs, 1, window=extraction.options.window)
    prompts = [{"prompt_token_ids": extraction.reader.read(ref).token_ids.tolist()[:-1]} for ref in share]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    list(meter.watch(engine.generate(prompts, sampling, use_tqdm=False)))
    return meter.stop()


def extract(extraction: Extraction, refs: list[SampleRef], store: Path) -> Cost:
    """The samples into a fresh store."""
    meter = Meter()
    written, _, refused = extraction.write(refs, store)
    assert (written, refused) == (len(refs), 0)
    list(meter.watch([None]))
    return meter.stop()


def main() -> None:
    """Parses, generates, lets both take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", default="tiny", help="tiny, smollm2, or the folder of a target with a chat template"
    )
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one to warm up")
    parser.add_argument("--aux-dtype", default="fp8")
    parser.add_argument("--targets", default="topk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = make_work(options.target, options.samples, folder)
        engine = open_prefill(work)
        DatasetDict({"train": Dataset.from_list(generate_rows(engine, work))}).save_to_disk(folder / "samples")
        capture = CaptureOptions(
            aux_layer_ids=work.aux_layer_ids, dtype="float32", aux_dtype=options.aux_dtype, targets=options.targets,
            max_shard_bytes=16 << 20,
        )  # fmt: skip
        extraction = Extraction(capture, folder / "samples", work.target, Ranks(0, 1, 1, torch.device("cpu")))
        refs = extraction.refs
        quarter = extract(extraction, refs[: len(refs) // 4], folder / "quarter")
        prefill(engine, extraction, refs)
        tokens = sum(ref.num_tokens - 1 for ref in refs)
        rounds, stages = [], watch_encoding()
        for number in range(options.repeats):
            first = extract(extraction, refs, folder / f"store-{number}") if number % 2 else None
            alone = prefill(engine, extraction, refs)
            whole = first or extract(extraction, refs, folder / f"store-{number}")
            contract = stages.seconds[CONTRACT] / (number + 1), stages.cpu_seconds[CONTRACT] / (number + 1)
            rounds.append((alone, whole))
            print(
                f"{len(refs)} samples, {tokens:,} tokens: prefill {tokens / alone.seconds:,.0f} tokens/s, "
                f"extraction {tokens / whole.seconds:,.0f} tokens/s",
                flush=True,
            )
        extraction.close()
    once, once_cpu = contract
    clock = [alone.seconds / (whole.seconds - once) for alone, whole in rounds]
    processor = [alone.cpu_seconds / (whole.cpu_seconds - once_cpu) for alone, whole in rounds]
    print(
        f"extraction has {statistics.median(clock):.2f} of prefill's tokens a second ({min(clock):.2f} to "
        f"{max(clock):.2f}), {statistics.median(processor):.2f} by the processor, {once:.1f} s of contract once in a "
        "run left out"
    )
    print(f"extraction's processor time: {stages.show(sum(whole.cpu_seconds for _, whole in rounds))}")
    print(f"peak memory: {quarter.peak_mb:.0f} MB for a quarter of the samples, {rounds[-1][1].peak_mb:.0f} MB for all")


if __name__ == "__main__":
    main()
