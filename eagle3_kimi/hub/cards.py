"""Cards: the README of a repository, with a label in its YAML that says what the repository holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CardData, RepoCard
from jinja2 import Environment, PackageLoader, StrictUndefined

from eagle3_kimi.errors import DataError

CARD_NAME = "README.md"
LABEL = "eagle3_kimi"
"""Key of the card's YAML: kind, schema version and target of what the repository holds."""

_BAR_WIDTH = 40


def render_card(template: str, data: CardData, label: Mapping[str, Any], **values: Any) -> str:
    """The card: `data` and the label as YAML, then the template of this package."""
    data[LABEL] = dict(label)
    environment = Environment(
        loader=PackageLoader("eagle3_kimi.hub", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    body = environment.get_template(template).render(label=label, **values)
    return str(RepoCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


def read_label(card: str | None) -> dict[str, Any] | None:
    """What the card says its repository holds; None where this package did not write it."""
    if card is None:
        return None
    try:
        return RepoCard(card, ignore_metadata_errors=True).data.get(LABEL)
    except ValueError:
        return None


def check_same_label(
    repo_id: str, mine: Mapping[str, Any], theirs: Mapping[str, Any] | None, content: Sequence[str]
) -> None:
    """Refuses to push into a repository of another kind or schema, or of someone else.

    Args:
        repo_id: for the message.
        mine: label of what is pushed.
        theirs: label of the repository's card, None if it has none.
        content: files of the repository, without those that any repository has.

    Raises:
        DataError: naming what differs.
    """
    check_no_loading_script(repo_id, content)
    if theirs is None:
        if content:
            raise DataError(
                f"{repo_id} holds files that eagle3-kimi did not push ({', '.join(sorted(content)[:3])}); "
                "give another repository"
            )
        return
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        raise DataError(
            f"{repo_id} holds {name} {theirs.get(name)!r}, this push has {mine.get(name)!r}; versions of one "
            "repository are alike: give another repository"
        )


def check_label(repo_id: str, tag: str, card: str | None, **expected: Any) -> dict[str, Any]:
    """Refuses a version of another kind or schema than this package reads; returns its label.

    Raises:
        DataError: naming what differs.
    """
    label = read_label(card)
    if label is None:
        raise DataError(f"{repo_id} {tag} was not pushed by eagle3-kimi: its card has no `{LABEL}` entry")
    for name, value in expected.items():
        if label.get(name) != value:
            raise DataError(
                f"{repo_id} {tag} has {name} {label.get(name)!r}, expected {value!r}; "
                "use the version of eagle3-kimi that wrote it, or another tag"
            )
    return label


def check_no_loading_script(repo_id: str, paths: Sequence[str]) -> None:
    """`datasets` 4 and later load no script, and refuse the repository for it.

    Raises:
        DataError: naming the script.
    """
    scripts = [path for path in paths if "/" not in path and path.endswith(".py")]
    if scripts:
        raise DataError(
            f"{repo_id} holds the loading script {scripts[0]}, which datasets 4 and later refuse to run; data sets are "
            "Parquet files: delete it, or give another repository"
        )


def public_name(name: str) -> str:
    """A target's name as a card shows it: a folder of this machine by its last part alone."""
    return Path(name).name if name.startswith((".", "/", "~")) or "\\" in name else name


def render_histogram(lengths: Sequence[int]) -> str:
    """Text bars over bins whose edges are powers of two."""
    bins: dict[int, int] = {}
    for length in lengths:
        exponent = max(length, 1).bit_length() - 1
        bins[exponent] = bins.get(exponent, 0) + 1
    if not bins:
        return "(none)"
    most = max(bins.values())
    lines = []
    for exponent in range(min(bins), max(bins) + 1):
        count = bins.get(exponent, 0)
        bar = "█" * (-(-count * _BAR_WIDTH // most))
        lines.append(f"{2**exponent:>7} to {2 ** (exponent + 1) - 1:<7} {count:>9}  {bar}".rstrip())
    return "\n".join(lines)
