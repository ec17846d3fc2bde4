"""Drafter directories: written from a checkpoint, checked, converted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eagle3_kimi.errors import UsageError

if TYPE_CHECKING:
    from eagle3_kimi.drafter.faults import Fault

Format = Literal["eagle3", "speculators"]

_TARGET = "The target: folder, Hub name in the local cache, or `tiny`."


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A step folder of a training run, or the run (its newest step).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The drafter directory; replaced if it exists.")],
    format: Annotated[Format, typer.Option(help="eagle3: vLLM and SGLang. speculators: vLLM.")] = "eagle3",
    target: Annotated[str | None, typer.Option(help="The target, if it is no longer where the run found it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the target's.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the target's own tokenizer code.")] = False,
) -> None:
    """Writes the drafter of a training checkpoint as engines load it, and checks it."""
    from eagle3_kimi.training.exporting import export_checkpoint

    step = export_checkpoint(
        checkpoint, output, target=target, dtype=dtype, format=format, trust_remote_code=trust_remote_code
    )
    typer.echo(f"{step.name} written to {output}, checked")


def export_check(
    drafter: Annotated[Path, typer.Argument(help="A drafter directory, in any of the published layouts.")],
    target: Annotated[str | None, typer.Option(help=f"{_TARGET} Without it, sizes and rope are not compared.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="vllm or sglang; repeat. Default: both.")] = None,
) -> None:
    """Says what vLLM and SGLang would make of a drafter directory, without starting either. Exit 1 on any fault."""
    from eagle3_kimi.drafter.export_check import find_folder_faults
    from eagle3_kimi.drafter.folder import DrafterFolder
    from eagle3_kimi.drafter.layouts import read_layout
    from eagle3_kimi.drafter.loading import ENGINES
    from eagle3_kimi.target import resolve_target

    engines = tuple(engine or ENGINES)
    config = None if target is None else resolve_target(target).config
    faults = find_folder_faults(drafter, target=config, engines=engines)
    folder = DrafterFolder(drafter)
    layout = read_layout(folder.config, folder.tensors).name
    if faults:
        _print_faults(faults, f"{drafter} (layout: {layout}) for {', '.join(engines)}")
        raise SystemExit(1)
    compared = f"agrees with {target}" if target else "not compared with a target (--target)"
    loaded = f"{len(folder.tensors)} tensors, each loaded by {' and '.join(engines)}"
    typer.echo(f"{drafter} (layout: {layout}): {loaded}; {compared}")


def convert(
    drafter: Annotated[Path, typer.Argument(help="A drafter directory, in any of the published layouts.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The directory to write; replaced if it exists.")],
    format: Annotated[Format, typer.Option(help="eagle3: vLLM and SGLang. speculators: vLLM.")] = "eagle3",
    target: Annotated[str | None, typer.Option(help=f"{_TARGET} Needed for --format speculators.")] = None,
    aux_layer_ids: Annotated[
        str | None, typer.Option(help="Boundary ids it was trained on (2,30,58), where the directory does not tell.")
    ] = None,
) -> None:
    """Writes another trainer's drafter as engines load it, where that loses nothing; refuses otherwise."""
    from eagle3_kimi.drafter.convert import convert_drafter
    from eagle3_kimi.target import resolve_target

    done = convert_drafter(
        drafter,
        output,
        target=None if target is None else resolve_target(target),
        format=format,
        aux_layer_ids=None if aux_layer_ids is None else parse_layer_ids(aux_layer_ids),
    )
    for change in done.changes:
        typer.echo(change)
    typer.echo(f"{drafter} (layout: {done.layout}) written to {output}, checked; {len(done.changes)} changes")


def parse_layer_ids(text: str) -> list[int]:
    """Boundary ids with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--aux-layer-ids wants numbers with commas between them (2,30,58), not {text!r}") from error


def _print_faults(faults: Sequence[Fault], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "what", "verdict", title=title)
    for fault in faults:
        table.add_row(str(fault.name), fault.sentence, "repair" if fault.repairable else "reject")
    Console(markup=False).print(table)
    typer.echo("`eagle3-kimi convert` mends what can be mended without loss, and says what cannot")
