"""`eagle3-kimi evaluate`: a drafter, measured where it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

KIMI = "moonshotai/Kimi-K2.5"
EPILOG = "Example: eagle3-kimi evaluate runs/drafter/export --target tiny --prompts mt_bench.jsonl -k 1..8"


def evaluate(
    drafter: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that training exported.")],
    prompts: Annotated[
        list[Path],
        typer.Option(
            help="SPEED-Bench, MT-Bench, GSM8K, HumanEval, MATH-500, or conversations; repeat for several files."
        ),
    ],
    target: Annotated[str, typer.Option(help="Folder, Hub name in the local cache, or `tiny`.")] = KIMI,
    target_revision: Annotated[str | None, typer.Option(help="Hub commit, branch or tag.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the target's own tokenizer code.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for acceptance.json and .svg; default: DIR.")
    ] = None,
    draft_lengths: Annotated[
        str, typer.Option("-k", "--num-speculative-tokens", help="3, 1..8 or 1,3,5: one engine each.")
    ] = "3",
    thinking: Annotated[str, typer.Option(help="on, off or both.")] = "both",
    temperature: Annotated[str, typer.Option(help="greedy, own (the model's) or both.")] = "both",
    limit: Annotated[int | None, typer.Option(help="Questions taken from each file, from its start.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer, reasoning included.")] = 4096,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt plus answer.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Turns decoded side by side; the speed-up depends on it.")] = 8,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share the target.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    engine: Annotated[str, typer.Option(help="vllm, or transformers to simulate alone.")] = "vllm",
    simulate: Annotated[
        bool | None, typer.Option(help="Simulate beside serving; default: where the target is small.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
) -> None:
    """Measures a drafter in vLLM: acceptance by span and length, speed-up, and whether the text stays the same."""
    from rich.console import Console

    from eagle3_kimi.evaluation.report import build_tables
    from eagle3_kimi.evaluation.run import ACCEPTANCE, evaluate_drafter
    from eagle3_kimi.evaluation.settings import EvaluationConfig, choose, parse_draft_lengths
    from eagle3_kimi.target import resolve_target

    config = EvaluationConfig(
        drafter=drafter,
        target=resolve_target(target, revision=target_revision, trust_remote_code=trust_remote_code),
        prompts=tuple(prompts),
        output=output or drafter,
        num_speculative_tokens=parse_draft_lengths(draft_lengths),
        thinking=tuple(mode == "on" for mode in choose(thinking, ("on", "off"), "--thinking")),
        temperatures=choose(temperature, ("greedy", "own"), "--temperature"),  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        limit=limit,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        seed=seed,
        simulate=simulate,
    )
    result = evaluate_drafter(config)
    write_plot(result, config.output / "acceptance.svg")
    for table in build_tables(result):
        Console().print(table)
    typer.echo(f"figures and settings in {config.output / ACCEPTANCE}; plot in {config.output / 'acceptance.svg'}")


def write_plot(result: dict[str, Any], file: Path) -> None:
    """Acceptance by position at the largest draft length, and acceptance length over draft lengths."""
    from eagle3_kimi.demo.charts import build_line_chart
    from eagle3_kimi.demo.report import draw_charts
    from eagle3_kimi.demo.workdir import write_text
    from eagle3_kimi.evaluation.report import name_result

    by_position, by_length = {}, {}
    for entry in result["results"]:
        name = name_result(entry)
        by_position[name] = list(enumerate([1.0, *entry["drafted"][-1]["acceptance_per_position"]]))
        lengths = [(d["num_speculative_tokens"], d["acceptance_length"]) for d in entry["drafted"]]
        by_length[name] = [(0, 1.0), *lengths]
    charts = [
        build_line_chart("Drafts accepted up to a position", by_position, x_label="position", y_max=1.0),
        build_line_chart("Acceptance length, bonus token included", by_length, x_label="draft length k"),
    ]
    write_text(file, draw_charts(charts) + "\n")
