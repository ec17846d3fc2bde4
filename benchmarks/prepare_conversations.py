"""Prepares the same ShareGPT rows with eagle3-kimi, speculators and SpecForge, by turns, and compares.

    python benchmarks/prepare_conversations.py --rows 100000 --num-proc 2 --repeats 3

Each peer gets a virtual environment of its own (made on first use, several gigabytes of torch; `--pip-options` goes to
pip). All use one tokenizer and template, the tiny Kimi target's. What each makes of the rows:

    ours           one sample for each answer, in the prompt that the served model would see; bad rows refused
    speculators    one sample for each answer; its HTTP calls to a render server are replaced by the same rendering
                   in the worker, to its advantage
    SpecForge      one sample for each conversation; a history that serving would have rendered otherwise is not noticed

Time is measured inside each process, after its imports, with the workers' own start included. Memory is the peak over
the process tree of what is not shared or file-backed (`Pss_Anon`; Linux). Ratios are of medians. De-duplication and
leak check, which the peers do not have, are timed apart. Figures are reported, not asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environments import PEERS, make_environment
from preparation.rows import write_rows

HERE = Path(__file__).parent / "preparation"


def run_once(python: Path | str, name: str, rows: Path, tokenizer: Path, num_proc: int) -> dict[str, Any]:
    """One preparation in a process of its own; its figures and its peak memory in MB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as output, tempfile.TemporaryFile("w+") as errors:
        command = [str(python), str(HERE / f"run_{name}.py"), str(rows), str(tokenizer), output, str(num_proc)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, tree_megabytes(process.pid))
            time.sleep(0.5)
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{name} failed:\n{errors.read()[-3000:]}")
    return {**json.loads(lines[-1]), "peak_mb": peak}


def tree_megabytes(root: int) -> float:
    """Private anonymous memory of a process and all below it; shared pages are shared out (PSS)."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    tree = {root}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    total = 0
    for pid in tree:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return total / 1024


def save_tokenizer(folder: Path) -> None:
    """The tiny Kimi tokenizer with its template."""
    from eagle3_kimi.tiny.problems import generate_problems
    from eagle3_kimi.tiny.tokenizer import build_tokenizer

    build_tokenizer(list(generate_problems(500, seed=0))).save_pretrained(folder)


def compare(options: argparse.Namespace, workdir: Path) -> dict[str, Any]:
    """All runs, by turns; the summary is what `--output` gets."""
    rows, fewer, tokenizer = workdir / "rows.jsonl", workdir / "fewer.jsonl", workdir / "tokenizer"
    write_rows(rows, options.rows)
    write_rows(fewer, options.rows // 10)
    save_tokenizer(tokenizer)
    pythons: dict[str, Path | str] = {"ours": sys.executable}
    for name in options.peers:
        pythons[name] = make_environment(name, options.environments, options.pip_options.split())
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for repeat in range(options.repeats):
        for name, python in pythons.items():
            runs[name].append(run_once(python, name, rows, tokenizer, options.num_proc))
            print(f"run {repeat + 1}, {name}: {runs[name][-1]}", file=sys.stderr)
    medians = {
        name: {key: statistics.median(run[key] for run in made) for key in made[0]} for name, made in runs.items()
    }
    few = run_once(sys.executable, "ours", fewer, tokenizer, options.num_proc)
    screening = subprocess.run(
        [sys.executable, str(HERE / "run_screening.py"), str(rows)], check=True, capture_output=True, text=True
    )
    ratios = {
        key: min(medians[name][key] for name in options.peers) / medians["ours"][key]
        for key in ("seconds", "cpu_seconds")
        if options.peers
    }
    return {
        "rows": options.rows,
        "megabytes": rows.stat().st_size / 1e6,
        "num_proc": options.num_proc,
        "median": medians,
        "runs": runs,
        "faster_peer_over_ours": ratios,
        "ours_peak_mb_with_a_tenth_of_the_rows": few["peak_mb"],
        "screening": json.loads(screening.stdout),
    }


def print_table(summary: dict[str, Any]) -> None:
    """The summary for people."""
    print(f"{summary['rows']} rows, {summary['megabytes']:.0f} MB, {summary['num_proc']} processes; medians")
    print(f"{'':14}{'samples':>9}{'wall s':>9}{'CPU s':>9}{'rows/CPU s':>12}{'peak MB':>9}")
    for name, made in summary["median"].items():
        rate = summary["rows"] / made["cpu_seconds"]
        print(f"{name:14}{made['samples']:9.0f}{made['seconds']:9.1f}{made['cpu_seconds']:9.1f}{rate:12.0f}", end="")
        print(f"{made['peak_mb']:9.0f}")
    ratios = summary["faster_peer_over_ours"]
    if ratios:
        print(f"faster peer / ours: {ratios['seconds']:.2f} in wall time, {ratios['cpu_seconds']:.2f} in CPU time")
    print(f"our peak with a tenth of the rows: {summary['ours_peak_mb_with_a_tenth_of_the_rows']:.0f} MB")
    print("apart, in one process:", {key: round(value, 1) for key, value in summary["screening"].items()})


def main() -> None:
    """Parses and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--environments", type=Path, default=Path(".benchmarks/environments"))
    parser.add_argument("--pip-options", default="", help="for example '--index-url URL'")
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/prepare_conversations.json"))
    options = parser.parse_args()
    workdir = Path(tempfile.mkdtemp(prefix="prepare-conversations-"))
    try:
        summary = compare(options, workdir)
    finally:
        shutil.rmtree(workdir)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(summary, indent=2) + "\n")
    print_table(summary)


if __name__ == "__main__":
    main()
