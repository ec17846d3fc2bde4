"""`eagle3-kimi push` and `eagle3-kimi pull`: versions on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KIMI = "moonshotai/Kimi-K2.5"

push = typer.Typer(
    help="Pushes a data set, a feature store or a drafter to the Hub as a new version.",
    epilog="Example: eagle3-kimi push dataset samples me/kimi-reasoning --tag v1.2.0",
    no_args_is_help=True,
)
pull = typer.Typer(
    help="Pulls a version of a data set, a feature store or a drafter from the Hub.",
    epilog="Example: eagle3-kimi pull drafter me/kimi-eagle3 --tag v1.2.0 -o drafter",
    no_args_is_help=True,
)

Repo = Annotated[str, typer.Argument(metavar="REPO", help="NAMESPACE/NAME.")]
NewTag = Annotated[str, typer.Option(help="Name of the new version, such as v1.2.0; it is never moved.")]
Tag = Annotated[str, typer.Option(help="The version, such as v1.2.0.")]
Public = Annotated[bool, typer.Option("--public", help="Create the repository for everyone to see.")]
DryRun = Annotated[Path | None, typer.Option(metavar="DIR", help="Write everything to DIR instead.")]
Licence = Annotated[str | None, typer.Option("--license", help="For the card: an identifier such as apache-2.0.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")]
TargetRevision = Annotated[str | None, typer.Option(help="Hub commit, branch or tag.")]


@push.command("dataset", epilog="Example: eagle3-kimi push dataset samples me/kimi-reasoning --tag v1.2.0")
def push_dataset(
    path: Annotated[Path, typer.Argument(help="Folder that `generate` wrote.")],
    repo: Repo,
    tag: NewTag,
    public: Public = False,
    dry_run: DryRun = None,
    licence: Licence = None,
) -> None:
    """Complete samples and quarantine, as Parquet; refused unless every sample is reasoning-complete."""
    from eagle3_kimi.hub.dataset import push_dataset as run

    typer.echo(run(path, repo, tag=tag, private=not public, licence=licence, dry_run=dry_run))


@push.command("features", epilog="Example: eagle3-kimi push features features me/kimi-features --tag v1.2.0")
def push_features(
    path: Annotated[Path, typer.Argument(help="Folder of the feature store.")],
    repo: Repo,
    tag: NewTag,
    public: Public = False,
    dry_run: DryRun = None,
) -> None:
    """Feature shards, one by one with their checksums; refused without a passed contract check."""
    from eagle3_kimi.hub.features import push_features as run

    typer.echo(run(path, repo, tag=tag, private=not public, dry_run=dry_run))


@push.command("drafter", epilog="Example: eagle3-kimi push drafter drafter/export me/kimi-eagle3 --tag v1.2.0")
def push_drafter(
    path: Annotated[Path, typer.Argument(help="Folder that training exported.")],
    repo: Repo,
    tag: NewTag,
    target: Annotated[str, typer.Option(help="Target it drafts for: folder, Hub name in the cache, or `tiny`.")] = KIMI,
    target_revision: TargetRevision = None,
    public: Public = False,
    dry_run: DryRun = None,
    licence: Licence = None,
) -> None:
    """Config, weights, measured acceptance and card; refused if the export check fails."""
    from eagle3_kimi.hub.drafter import push_drafter as run
    from eagle3_kimi.target import resolve_target

    found = resolve_target(target, revision=target_revision)
    typer.echo(run(path, repo, tag=tag, target=found, private=not public, licence=licence, dry_run=dry_run))


@pull.command("dataset", epilog="Example: eagle3-kimi pull dataset me/kimi-reasoning --tag v1.2.0 -o samples")
def pull_dataset(repo: Repo, tag: Tag, output: Output) -> None:
    """Complete samples and quarantine, checked row by row, as `generate` writes them."""
    from eagle3_kimi.hub.dataset import pull_dataset as run

    pulled = run(repo, output, tag=tag)
    typer.echo(f"{pulled.complete} complete + {pulled.quarantined} quarantined samples in {pulled.folder}")


@pull.command("features", epilog="Example: eagle3-kimi pull features me/kimi-features --tag v1.2.0 -o features")
def pull_features(repo: Repo, tag: Tag, output: Output) -> None:
    """Feature shards, one by one, compared with their checksums; run again, it goes on."""
    from eagle3_kimi.hub.features import pull_features as run

    store = run(repo, output, tag=tag)
    typer.echo(f"{len(store)} samples ({sum(store.lengths)} tokens) in {output}")


@pull.command("drafter", epilog="Example: eagle3-kimi pull drafter me/kimi-eagle3 --tag v1.2.0 -o drafter")
def pull_drafter(
    repo: Repo,
    tag: Tag,
    output: Output,
    target: Annotated[str | None, typer.Option(help="Check the export against this target.")] = None,
    target_revision: TargetRevision = None,
) -> None:
    """Config, weights and card, as engines load them."""
    from eagle3_kimi.hub.drafter import pull_drafter as run
    from eagle3_kimi.target import resolve_target

    found = None if target is None else resolve_target(target, revision=target_revision)
    run(repo, output, tag=tag, target=found)
    typer.echo(f"the drafter is in {output}")
