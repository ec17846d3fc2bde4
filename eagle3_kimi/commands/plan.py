"""`eagle3-kimi plan`: disk, memory and time of a run before it starts. Reads the target's config alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_kimi.hidden_states.disk import show_size

if TYPE_CHECKING:
    from rich.table import Table

    from eagle3_kimi.plan import Plan, PlanRequest

EPILOG = "Example: eagle3-kimi plan --target moonshotai/Kimi-K2.5 --samples 88000 --mean-tokens 2000 --gpus 8x96GB"


def plan(
    target: Annotated[
        str, typer.Option(help="moonshotai/Kimi-K2.5, `tiny`, a folder, or a Hub name in the local cache.")
    ] = "moonshotai/Kimi-K2.5",
    samples: Annotated[int, typer.Option(help="Complete samples.")] = 88000,
    mean_tokens: Annotated[int, typer.Option(help="Of a sample: prompt, reasoning and answer.")] = 2000,
    gpus: Annotated[str, typer.Option(help="Count and memory of one.")] = "8x96GB",
    gpu_tflops: Annotated[float, typer.Option(help="Dense bf16 TFLOPS of one GPU; the default is an H20's.")] = 148.0,
    gpu_bandwidth_tbs: Annotated[float, typer.Option(help="Memory bandwidth of one GPU, TB/s; an H20's.")] = 4.0,
    answer_share: Annotated[float, typer.Option(help="Share of the tokens that the target writes.")] = 0.9,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences decoded side by side.")] = 256,
    draft_vocab_size: Annotated[int, typer.Option(help="Of the drafter.")] = 32000,
    ttt_steps: Annotated[int, typer.Option(help="Training-time-test steps.")] = 7,
    epochs: Annotated[int, typer.Option(help="Passes over the samples.")] = 3,
    micro_batch_tokens: Annotated[int, typer.Option(help="Tokens a GPU trains on at once.")] = 16384,
    aux_dtype: Annotated[str, typer.Option(help="Store format that is checked against --disk: fp8 or bf16.")] = "fp8",
    targets: Annotated[str, typer.Option(help="Store format that is checked against --disk: topk or state.")] = "topk",
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Exit 1 when this folder's disk cannot hold the run; the default warns of the current folder's.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Says what a run takes before it starts: disk by store format, memory per GPU and phase, tokens, time."""
    from rich.console import Console

    from eagle3_kimi.errors import UsageError
    from eagle3_kimi.plan import PlanRequest, list_assumptions, make_plan, parse_gpus
    from eagle3_kimi.target_sizes import read_target_sizes

    num_gpus, gpu_bytes = parse_gpus(gpus)
    request = PlanRequest(
        target=read_target_sizes(target),
        samples=samples,
        mean_tokens=mean_tokens,
        answer_share=answer_share,
        num_gpus=num_gpus,
        gpu_bytes=gpu_bytes,
        gpu_tflops=gpu_tflops,
        gpu_bandwidth_tbs=gpu_bandwidth_tbs,
        max_num_seqs=max_num_seqs,
        draft_vocab_size=draft_vocab_size,
        ttt_steps=ttt_steps,
        epochs=epochs,
        micro_batch_tokens=micro_batch_tokens,
    )
    made, chosen = make_plan(request), (aux_dtype, targets)
    if chosen not in made.store_bytes:
        known = ", ".join(" ".join(form) for form in made.store_bytes)
        raise UsageError(f"a store's format is one of {known} (--aux-dtype, --targets), not {' '.join(chosen)}")
    weight = sum(request.target.weight_bytes.values())
    console = Console()
    console.print(
        f"{target}: {show_size(weight)} of weights, {request.target.active_parameters / 1e9:.3g} G parameters active; "
        f"{request.tokens:,} tokens in {samples:,} samples, {request.tokens * answer_share:,.0f} of them supervised"
    )
    console.print(_build_store_table(made, request, chosen))
    console.print(_build_phase_table(made))
    console.print("Assumed:")
    for line in list_assumptions(request):
        console.print(f"  - {line}")
    if not _fits_on_disk(made, request, chosen, disk or Path()) and disk is not None:
        raise typer.Exit(1)


def _build_store_table(made: Plan, request: PlanRequest, chosen: tuple[str, str]) -> Table:
    from rich.table import Table

    table = Table(title="Disk")
    table.add_column("what")
    table.add_column("bytes a token", justify="right")
    table.add_column("in all", justify="right")
    for form, size in made.store_bytes.items():
        name = f"store, aux {form[0]}, targets {form[1]}{' (checked)' if form == chosen else ''}"
        table.add_row(name, f"{size:,.0f}", show_size(size * request.tokens))
    peers = made.peers_bytes
    name = "as other trainers store it (bf16, state everywhere)"
    table.add_row(name, f"{peers:,.0f}", show_size(peers * request.tokens))
    for name, size in made.other_disk.items():
        table.add_row(name, "", show_size(size))
    return table


def _build_phase_table(made: Plan) -> Table:
    from rich.table import Table

    table = Table(title="Memory of each GPU, and time", show_lines=True)
    for column in ("phase", "memory", "of which", "time", ""):
        table.add_column(column)
    for phase in made.phases:
        parts = "\n".join(f"{show_size(size)} {name}" for name, size in phase.memory.items())
        verdict = show_size(phase.bytes) if phase.fits else f"[red]{show_size(phase.bytes)}: does not fit[/red]"
        time = "-" if phase.seconds is None else show_time(phase.seconds)
        table.add_row(phase.name, verdict, parts, time, phase.note)
    return table


def _fits_on_disk(made: Plan, request: PlanRequest, chosen: tuple[str, str], disk: Path) -> bool:
    """Says whether the run can be held, and what to do if not."""
    from eagle3_kimi.errors import UsageError

    if not disk.is_dir():
        raise UsageError(f"--disk wants a folder that exists, {disk} does not")
    free = shutil.disk_usage(disk).free
    needed = made.store_bytes[chosen] * request.tokens + sum(made.other_disk.values())
    if needed <= free:
        typer.echo(f"{disk.resolve()} has {show_size(free)} free; the run takes {show_size(needed)}")
        return True
    smallest = min(made.store_bytes, key=made.store_bytes.__getitem__)
    cure = "" if chosen == smallest else f"store aux {smallest[0]} and targets {smallest[1]}, "
    typer.echo(
        f"warning: {disk.resolve()} has {show_size(free)} free, the run takes {show_size(needed)}: {cure}extract and "
        "train in parts with --max-disk, or find a larger disk",
        err=True,
    )
    return False


def show_time(seconds: float) -> str:
    """`2 days 3 h`, `7.4 h`, `12 min`: no finer than an estimate is."""
    hours = seconds / 3600
    if hours >= 48:
        return f"{int(hours // 24)} days {hours % 24:.0f} h"
    return f"{hours:.1f} h" if hours >= 1 else f"{max(seconds / 60, 1):.0f} min"
