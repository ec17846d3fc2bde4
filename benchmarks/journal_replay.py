"""How fast a journal is replayed, and that memory does not grow with it.

    python benchmarks/journal_replay.py [--samples 100000] [--tokens 2000] [--folder DIR]

Makes a journal of that many samples, in the order in which an engine would have finished them, and one of a quarter of
it. Each is then replayed in a process of its own, as the builder does, and timed:

    read       the journal alone: every checksum verified, every record read
    resume     the run finds every sample in the journal and generates nothing
    replay     resume, then every record read in prompt order: what the builder hands to `datasets`
    builder    `load_dataset("kimi_reasoning", ...)` to the end: prompts, resume, replay, checks, Arrow files

Needs about 30 KB of disk a sample (`--folder` says where). Figures are reported, not asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eagle3_kimi
from eagle3_kimi.engines import EngineInfo, Generation
from eagle3_kimi.generation import GenerationConfig, GenerationRun
from eagle3_kimi.generation.config import request_seed
from eagle3_kimi.generation.rows import build_provenance, build_row
from eagle3_kimi.prompts import load_conversations
from eagle3_kimi.protocol import Reason, Span, SpanKind, TurnReading

MEASUREMENTS = ("read", "resume", "replay", "builder")

_VOCAB_SIZE = 160_000  # ids of Kimi's length; with Kimi's own size the preset would ask for Kimi's ids
_IN_FLIGHT = 512
_CHARACTERS_PER_TOKEN = 4
_TEXT = "the train leaves at nine and takes four hours so it arrives by one if nothing else is late 7 12 * 3 = 36"
_WORDS = _TEXT.split()


def make_target(folder: Path) -> Path:
    """A target folder that holds a tokenizer only: nothing is generated here."""
    from eagle3_kimi.tiny.problems import generate_problems
    from eagle3_kimi.tiny.tokenizer import build_tokenizer

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": _VOCAB_SIZE, "max_position_embeddings": 262144}))
    build_tokenizer(list(generate_problems(300, seed=1))).save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int) -> None:
    """Different prompts of about twenty words."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            file.write(json.dumps({"prompt": f"{index}: {' '.join(rng.choices(_WORDS, k=20))}?"}) + "\n")


def write_journal(run: GenerationRun, prompts: Path, num_tokens: int) -> None:
    """One complete sample for every prompt; neighbours finish in any order."""
    rng = random.Random(1)
    answers = [_make_answer(rng, num_tokens) for _ in range(200)]
    info = EngineInfo(name="synthetic", version="1", device="none")
    waiting: list[dict[str, Any]] = []
    with run.journal as journal:
        for chain in run.chains(load_conversations([prompts])):
            turn = chain.next_turn()
            assert turn is not None
            ids, reading = rng.choice(answers)
            generation = Generation(
                request_id=turn.id, prompt_token_ids=turn.prompt_token_ids, output_token_ids=ids, finish_reason="stop"
            )
            seed = request_seed(0, turn.id)
            provenance = build_provenance(run.key, "synthetic", info, run.protocol.preset.name, seed)
            row = build_row(turn, "benchmark", generation, reading, provenance)
            waiting.append({"id": turn.id, "reason": "ok", "row": row})
            if len(waiting) == _IN_FLIGHT:
                journal.append(waiting.pop(rng.randrange(_IN_FLIGHT)))
        for record in waiting:
            journal.append(record)


def _make_answer(rng: random.Random, num_tokens: int) -> tuple[list[int], TurnReading]:
    ids = [rng.randrange(1000, _VOCAB_SIZE) for _ in range(num_tokens)]
    end = num_tokens * 3 // 4
    text = " ".join(rng.choices(_WORDS, k=num_tokens))[: num_tokens * _CHARACTERS_PER_TOKEN]
    cut = len(text) * 3 // 4
    spans = (Span(SpanKind.REASONING, 0, end), Span(SpanKind.ANSWER, end + 1, num_tokens - 1))
    return ids, TurnReading(reason=Reason.OK, spans=spans, reasoning=text[:cut], content=text[cut:])


def open_run(folder: Path) -> GenerationRun:
    """The run whose journal, prompts and target lie in `folder`."""
    return GenerationRun(GenerationConfig(target=str(folder / "target"), journal_dir=folder / "journals"))


def replay(run: GenerationRun, prompts: Path) -> Iterator[dict[str, Any]]:
    """What the builder's `_split_generators` and `_generate_examples` do with a journal."""
    report = run.run(load_conversations([prompts]))
    assert not report.generated
    offsets = [entry.offset for _, entry in report.finished_turns()]
    for offset in offsets:
        yield run.journal.read_at(offset)["row"]


def measure(folder: Path, what: str, count: int) -> dict[str, float]:
    """Runs one of the four in this process; seconds by the clock and of the processor, peak memory."""
    prompts = folder / "prompts.jsonl"
    run = open_run(folder)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    if what == "read":
        rows = sum(1 for entry in run.journal.index().values() if run.journal.read_at(entry.offset)["row"])
    elif what == "resume":
        report = run.run(load_conversations([prompts]))
        rows = report.complete
        assert not report.generated
    elif what == "replay":
        rows = sum(1 for _ in replay(run, prompts))
    else:
        samples = eagle3_kimi.load_dataset(
            "kimi_reasoning",
            data_files=str(prompts),
            target=str(folder / "target"),
            journal_dir=str(folder / "journals"),
            cache_dir=str(folder / "cache"),
        )
        rows = sum(map(len, samples.values()))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    assert rows == count, f"{rows} rows of {count}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak}


def measure_in_child(folder: Path, what: str, count: int) -> dict[str, float]:
    """`measure` in a process of its own, so that peak memory is that measurement's alone."""
    command = [sys.executable, __file__, "--folder", str(folder), "--samples", str(count), "--measure", what]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def compare(folder: Path, count: int, num_tokens: int) -> None:
    """Makes the two journals, replays each four ways, and prints a line each."""
    for samples in (count // 4, count):
        place = folder / f"samples-{samples}"
        make_target(place / "target")
        write_prompts(place / "prompts.jsonl", samples)
        run = open_run(place)
        write_journal(run, place / "prompts.jsonl", num_tokens)
        megabytes = run.journal.path.stat().st_size / 1e6
        for what in MEASUREMENTS:
            figures = measure_in_child(place, what, samples)
            print(
                f"{samples:,} samples of {num_tokens:,} tokens, {megabytes:,.0f} MB, {what}: "
                f"{figures['seconds']:.1f} s = {megabytes / figures['seconds']:,.0f} MB/s "
                f"({megabytes / figures['cpu_seconds']:,.0f} MB a CPU second), peak {figures['peak_mb']:,.0f} MB",
                flush=True,
            )
        shutil.rmtree(place)


def main() -> None:
    """Compares in child processes; with `--measure`, is such a child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2000, help="output tokens of a sample")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the journals go while they are needed; default: the system's temporary folder",
    )
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.folder, options.measure, options.samples)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        compare(Path(folder), options.samples, options.tokens)


if __name__ == "__main__":
    main()
