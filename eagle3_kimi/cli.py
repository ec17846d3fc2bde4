"""The command line: `eagle3-kimi COMMAND`. Parses, calls one function, prints; heavy imports stay inside commands."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from eagle3_kimi.commands import drafter, evaluate, hub, plan, store
from eagle3_kimi.errors import Eagle3KimiError, UsageError

KIMI = "moonshotai/Kimi-K2.5"

app = typer.Typer(
    name="eagle3-kimi",
    help="EAGLE-3 draft models for Kimi-K2.5, trained on reasoning-complete samples.",
    epilog="Example: eagle3-kimi demo, then eagle3-kimi COMMAND --help; from an empty node: docs/kimi-k2.5.md",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Runs a command. Exit codes: 0 done, 1 the data or the run is not good enough, 2 wrong usage."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("eagle3_kimi").setLevel(logging.INFO)  # others only warn
    try:
        app()
    except Eagle3KimiError as error:
        typer.echo(f"eagle3-kimi: {error}", err=True)
        raise SystemExit(error.exit_code) from error


@app.command(epilog="Example: eagle3-kimi demo --workdir runs/demo --engine vllm")
def demo(
    workdir: Annotated[Path, typer.Option(help="Where the run is kept; run again, finished stages are reused.")] = Path(
        "runs/demo"
    ),
    engine: Annotated[str, typer.Option(help="vllm, or transformers where vLLM cannot be installed.")] = "vllm",
    seed: Annotated[int, typer.Option(help="Seed of prompts, sampling and training.")] = 0,
) -> None:
    """The whole pipeline on the tiny Kimi target: samples, hidden states, drafter, acceptance, a report."""
    from eagle3_kimi.demo import render_table, run_demo

    summary = run_demo(workdir, engine=engine, seed=seed)
    from rich.console import Console

    Console().print(render_table(summary))


@app.command(epilog="Example: eagle3-kimi prompts builders/mixes/10k.yaml -o prompts --num-proc 8 --target tiny")
def prompts(
    spec: Annotated[Path, typer.Argument(help="A mix: which sources, how much of each.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for prompts, refused rows and the report.")],
    num_proc: Annotated[int, typer.Option(help="Processes; the result does not depend on it.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Instead of the mix's own.")] = None,
    evaluation_set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="Refuse prompts that share 13 words with it; repeat.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Count this target's tokens (else words): as in `generate`.")
    ] = None,
    target_revision: Annotated[str | None, typer.Option(help="Hub commit, branch or tag.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the target's own tokenizer code.")] = False,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Refuse longer prompts; needs --target.")] = None,
    skip_bad_files: Annotated[
        bool, typer.Option(help="Go on when a file cannot be read; the report names it.")
    ] = False,
) -> None:
    """Builds a mix of prompts from public data sets: clean, balanced, without duplicates and without leaks."""
    from rich.console import Console

    from eagle3_kimi.prompts import TokenCounter, build_mix, parse_evaluation_sets
    from eagle3_kimi.prompts.report import tables_of
    from eagle3_kimi.target import resolve_target

    counter = None
    if target is not None:
        counter = TokenCounter(resolve_target(target, revision=target_revision, trust_remote_code=trust_remote_code))
    report = build_mix(
        spec, output, num_proc=num_proc, seed=seed, evaluation_sets=parse_evaluation_sets(evaluation_set or []),
        count_tokens=counter, max_prompt_tokens=max_prompt_tokens, skip_bad_files=skip_bad_files,
    )  # fmt: skip
    for table in tables_of(report):
        Console().print(table)
    typer.echo(f"{report['rows']} conversations in {output / 'prompts.jsonl'}; report in {output / 'report.html'}")


@app.command(epilog="Example: eagle3-kimi generate prompts.jsonl --target tiny --temperature 0 -o samples")
def generate(
    prompts: Annotated[list[Path], typer.Argument(help="Files of prompts or conversations, or a mix (.yaml).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the data set (save_to_disk).")],
    target: Annotated[str, typer.Option(help="Folder, Hub name in the local cache, or `tiny`.")] = KIMI,
    target_revision: Annotated[str | None, typer.Option(help="Hub commit, branch or tag.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the target's own tokenizer code.")] = False,
    engine: Annotated[str, typer.Option(help="vllm, transformers or server.")] = "vllm",
    server_url: Annotated[str, typer.Option(help="Address of a running server, for --engine server.")] = "",
    server_seconds_per_token: Annotated[
        float, typer.Option(help="Time limit of a server's request, per token of --max-tokens.")
    ] = 0.25,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer, reasoning included.")] = 32768,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    samples_per_prompt: Annotated[int, typer.Option(help="Independent generations of each conversation.")] = 1,
    min_reasoning_tokens: Annotated[int, typer.Option(help="A shorter reasoning is refused.")] = 1,
    validation_fraction: Annotated[float, typer.Option(help="Share of conversations in `validation`.")] = 0.05,
    retry_rejected: Annotated[bool, typer.Option(help="Generate again what the journal holds as refused.")] = False,
    max_truncated: Annotated[float, typer.Option(help="Stop above this share of truncated samples.")] = 0.5,
    max_incomplete: Annotated[float, typer.Option(help="Stop above this share of otherwise incomplete ones.")] = 0.2,
    breaker_window: Annotated[int, typer.Option(help="Samples the circuit breaker looks back on.")] = 200,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs per copy of the target.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus answer.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in one engine step.")] = 256,
    journal_dir: Annotated[Path | None, typer.Option(help="Where journals live; default: the cache folder.")] = None,
    capture_hidden_states: Annotated[
        Path | None, typer.Option(metavar="STORE", help="Also fill this feature store, in the same pass (vllm only).")
    ] = None,
    aux_layer_ids: Annotated[
        str | None, typer.Option(help="Of the store: boundary ids (2,30,58); default: (2, n // 2, n - 3).")
    ] = None,
    aux_dtype: Annotated[str, typer.Option(help="Of the store's aux states: fp8, bf16 or fp32.")] = "fp8",
    targets: Annotated[str, typer.Option(help="What the store keeps of the target's choices: topk or state.")] = "topk",
    top_k: Annotated[int, typer.Option(help="Tokens of a topk target.")] = 64,
    push_to: Annotated[str | None, typer.Option(metavar="REPO", help="Push the data set there; needs --tag.")] = None,
    tag: Annotated[str | None, typer.Option(help="Name of the version that is pushed, such as v1.2.0.")] = None,
) -> None:
    """Generates reasoning-complete samples: the same journal and data set as `load_dataset("kimi_reasoning", ...)`."""
    options = dict(locals())
    import eagle3_kimi
    from eagle3_kimi.builders.loading import save_whole
    from eagle3_kimi.hub.repository import check_destination

    check_destination(push_to, tag, "dataset")
    files = [str(path) for path in options.pop("prompts")]
    for name in ("output", "push_to", "tag"):
        options.pop(name)
    options["journal_dir"] = str(journal_dir) if journal_dir else None
    options["capture_hidden_states"] = str(capture_hidden_states) if capture_hidden_states else None
    options["aux_layer_ids"] = drafter.parse_layer_ids(aux_layer_ids) if aux_layer_ids else None
    samples = eagle3_kimi.load_dataset("kimi_reasoning", data_files=files, **options)
    refused = eagle3_kimi.load_dataset("kimi_reasoning", "quarantine", data_files=files, **options)
    eagle3_kimi.validate(samples)
    save_whole(samples, output / "complete")
    save_whole(refused, output / "quarantine")
    complete, rejected = sum(map(len, samples.values())), sum(map(len, refused.values()))
    typer.echo(f"{complete + rejected} turns = {complete} complete + {rejected} quarantined; data set in {output}")
    if push_to and tag:
        hub.push_dataset(output, push_to, tag)


@app.command(epilog="Example: eagle3-kimi audit captured/*.jsonl.gz --out repaired.jsonl --quarantine refused.jsonl")
def audit(
    paths: Annotated[list[str], typer.Argument(help="Files or globs of captured responses.")],
    out: Annotated[Path | None, typer.Option(help="Where to write accepted and repaired rows.")] = None,
    quarantine: Annotated[Path | None, typer.Option(help="Where to write refused rows.")] = None,
    min_complete: Annotated[float, typer.Option(help="Exit 1 below this share of complete rows.")] = 1.0,
    target: Annotated[
        str | None, typer.Option(help="Read token ids with this target's tokenizer: they decide over text.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the target's own tokenizer code.")] = False,
) -> None:
    """Says which responses captured elsewhere are reasoning-complete, what is wrong, and what can be saved."""
    from eagle3_kimi.captures import CaptureContext, render, run_audit
    from eagle3_kimi.captures.audit import find_files
    from eagle3_kimi.captures.progress import AuditProgress

    context = None
    if target is not None:
        from eagle3_kimi.target import resolve_target

        found = resolve_target(target, trust_remote_code=trust_remote_code)
        protocol = found.load_protocol(found.load_tokenizer())
        tags = (protocol.preset.think_start, protocol.preset.think_end)
        context = CaptureContext(protocol=protocol, think_tags=tags)
    elif trust_remote_code:
        raise UsageError("--trust-remote-code allows a target's tokenizer code; name the target with --target")
    with AuditProgress(find_files(paths)) as progress:
        report = run_audit(paths, out, quarantine, min_complete, context=context, progress=progress)
    typer.echo(render(report))
    raise SystemExit(0 if report.passed else 1)


app.command(epilog="Example: eagle3-kimi export runs/drafter -o kimi-k2.5-drafter")(drafter.export)
app.command(epilog="Example: eagle3-kimi export-check kimi-k2.5-drafter --target moonshotai/Kimi-K2.5")(
    drafter.export_check
)
app.command(epilog="Example: eagle3-kimi convert specforge-drafter -o drafter --target moonshotai/Kimi-K2.5")(
    drafter.convert
)
app.add_typer(hub.push, name="push")
app.add_typer(hub.pull, name="pull")
app.command(epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command(epilog=plan.EPILOG)(plan.plan)
app.add_typer(store.app, name="store")
