"""Where rows come from: local files, or a data set on the Hub at a revision that is written down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts.conversations import Reading
from eagle3_kimi.prompts.files import BadJson, read_rows
from eagle3_kimi.prompts.streams import shuffled

LOCK_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of a mix: a Hub data set or local files, and how much of it."""

    name: str
    """In reports and in each row's `source`."""
    hub: str | None = None
    """Hub data set (`HuggingFaceH4/ultrachat_200k`), read as a stream."""
    subset: str | None = None
    """The Hub data set's configuration."""
    split: str = "train"
    """The Hub data set's split."""
    revision: str | None = None
    """Commit, tag or branch; resolved to a commit at first use and kept in the lock file."""
    files: tuple[str, ...] = ()
    """Local files, relative to the mix's folder; glob patterns are understood."""
    count: int | None = None
    """Conversations to take."""
    weight: float | None = None
    """Share of what the counted sources leave of the mix's `size`."""
    prompt_field: str | None = None
    """The field that holds the prompt, where the shape does not say."""
    roles: dict[str, str] = field(default_factory=dict)
    """Role names of this source that are not understood, each with its role."""
    keep: dict[str, list[Any]] = field(default_factory=dict)
    """Only rows whose field has one of these values."""
    language: str = ""
    """The prompts' language, where the rows do not say."""
    domain: str = ""
    """`chat`, `code`, `tools`, `math`, ...: for the report."""

    def __post_init__(self) -> None:
        if bool(self.hub) == bool(self.files):
            raise UsageError(f"source {self.name}: name either `hub` or `files`")
        if (self.count is None) == (self.weight is None):
            raise UsageError(f"source {self.name}: give either `count` or `weight`")
        if (self.count or 0) < 0 or (self.weight or 0) < 0:
            raise UsageError(f"source {self.name}: `count` and `weight` cannot be negative")

    @property
    def reading(self) -> Reading:
        names = {name.strip().casefold(): role for name, role in self.roles.items()}
        return Reading(role_names=names, prompt_field=self.prompt_field)

    def keeps(self, row: Any) -> bool:
        """False for rows the person does not want; they are not refused, only not chosen."""
        return all(isinstance(row, Mapping) and row.get(key) in values for key, values in self.keep.items())


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A raw row and where it stands, for messages."""

    file: str
    row: int
    """From 1; the position in the (shuffled) stream, for a Hub data set."""
    value: Any


def iter_rows(
    source: Source,
    *,
    folder: Path,
    revision: str | None,
    seed: int,
    on_bad_file: Callable[[Path, DataError], None] | None = None,
) -> Iterator[SourceRow]:
    """Rows in an order that depends on the seed alone.

    Args:
        folder: the mix's folder, for local files.
        revision: the Hub commit from the lock.
        on_bad_file: called with a file that cannot be read on; without it, such a file stops the run.

    Raises:
        UsageError: a file is missing.
        DataError: a file is damaged, or the Hub data set cannot be read.
    """
    if source.hub:
        return _iter_hub(source, revision, seed)
    return shuffled(_iter_files(source, folder, on_bad_file), seed=seed)


def find_files(source: Source, folder: Path) -> list[Path]:
    """The source's local files, in the order named, patterns sorted."""
    found: list[Path] = []
    for pattern in source.files:
        path = Path(pattern)
        anchor, relative = (Path(path.anchor), path.relative_to(path.anchor)) if path.is_absolute() else (folder, path)
        matches = sorted(anchor.glob(str(relative)))
        if not matches:
            raise UsageError(f"source {source.name}: no file {anchor / relative}")
        found += matches
    return found


def _iter_files(
    source: Source, folder: Path, on_bad_file: Callable[[Path, DataError], None] | None
) -> Iterator[SourceRow]:
    for file in find_files(source, folder):
        try:
            for number, row in enumerate(read_rows(file), start=1):
                if isinstance(row, BadJson) or source.keeps(row):
                    yield SourceRow(str(file), number, row)
        except DataError as error:
            if on_bad_file is None:
                raise
            on_bad_file(file, error)


def _iter_hub(source: Source, revision: str | None, seed: int) -> Iterator[SourceRow]:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        stream = datasets.load_dataset(
            source.hub, source.subset, split=source.split, revision=revision, streaming=True
        ).shuffle(seed=seed, buffer_size=10_000)
        for number, row in enumerate(stream, start=1):
            if source.keeps(row):
                yield SourceRow(f"{source.hub}@{(revision or '')[:12]}", number, row)
    except (OSError, ValueError, DatasetsError) as error:
        where = f"{source.hub} (split {source.split}, revision {revision})"
        raise DataError(f"source {source.name}: {where} cannot be read: {error}") from error


def lock_path(mix: Path) -> Path:
    """The lock file beside a mix: `10k.yaml` -> `10k.lock.json`."""
    return mix.with_suffix(".lock.json")


def resolve_revisions(mix: Path, sources: tuple[Source, ...]) -> dict[str, str]:
    """Hub name -> commit: from the lock beside the mix where it has it, else from the Hub, and then locked.

    Raises:
        UsageError: the lock is damaged, or its folder cannot be written.
        DataError: the Hub does not know the data set or the revision.
    """
    path = lock_path(mix)
    locked = _read_lock(path)
    wanted = {_lock_key(source): source for source in sources if source.hub}
    missing = {key: source for key, source in wanted.items() if key not in locked}
    for key, source in missing.items():
        locked[key] = _resolve(source)
    if missing:
        _write_lock(path, locked)
    return {source.name: locked[_lock_key(source)] for source in sources if source.hub}


def _lock_key(source: Source) -> str:
    return f"{source.hub}@{source.revision}" if source.revision else str(source.hub)


def _resolve(source: Source) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        sha = HfApi().dataset_info(str(source.hub), revision=source.revision).sha
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DataError(
            f"source {source.name}: the Hub gave no revision for the data set {source.hub} "
            f"({source.revision or 'main'}): {error}. Check the name and the network, or name local `files`."
        ) from error
    return str(sha)


def _read_lock(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
        if lock["version"] != LOCK_VERSION:
            raise KeyError("version")
        return {str(key): str(commit) for key, commit in lock["revisions"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a lock file of version {LOCK_VERSION}; delete it to resolve again") from error


def _write_lock(path: Path, revisions: Mapping[str, str]) -> None:
    text = json.dumps({"version": LOCK_VERSION, "revisions": dict(sorted(revisions.items()))}, indent=2)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error}): copy the mix into a folder of your own") from error
