"""`eagle3-kimi store ...`: looks after feature stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Checks, describes and merges stores of hidden states.",
    epilog="Example: eagle3-kimi store check features",
    no_args_is_help=True,
)

StoreFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a feature store.")]


@app.command(epilog="Example: eagle3-kimi store check runs/demo/hidden_states")
def check(folder: StoreFolder) -> None:
    """Verifies every byte and every sample; names what to extract again. Exit 1 when something is wrong."""
    from eagle3_kimi.hidden_states.store_check import check_store

    report = check_store(folder)
    typer.echo(f"{folder}: {report.samples} samples ({report.tokens} tokens) are good, in {report.shards} shards")
    for shard, fault in report.damaged.items():
        typer.echo(f"damaged: {shard} {fault}")
    for sample in report.lost_ids:
        typer.echo(f"extract again: {sample}")
    if report.leftovers:
        typer.echo(f"left by an interrupted run, may be deleted: {', '.join(report.leftovers)}")
    if report.contract_fault:
        typer.echo(f"training refuses this store: {report.contract_fault}")
    if report.damaged:
        typer.echo("Delete the damaged shards and their indexes (.json), then run the extraction again")
    raise SystemExit(0 if report.ok else 1)


@app.command(epilog="Example: eagle3-kimi store info runs/demo/hidden_states")
def info(folder: StoreFolder) -> None:
    """Says what a store holds, from its indexes alone."""
    from eagle3_kimi.hidden_states.store_info import describe_store

    for name, value in describe_store(folder).items():
        typer.echo(f"{name:<18}{value}")


@app.command(epilog="Example: eagle3-kimi store merge node-0/features node-1/features -o features")
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Stores of one target and format.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the new store.")],
) -> None:
    """Joins stores of different samples into one; shards are linked where the file system can, else copied."""
    from eagle3_kimi.hidden_states.store_merge import merge_stores

    merged = merge_stores(folders, output)
    typer.echo(f"{output}: {len(merged)} samples ({sum(merged.lengths)} tokens) of {len(folders)} stores")
