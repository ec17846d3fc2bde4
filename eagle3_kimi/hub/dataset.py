"""Data sets on the Hub: Parquet with plain types, complete samples and the quarantine as two configurations.

complete/train-00000-of-00002.parquet       default configuration, splits train and validation
quarantine/train-00000-of-00001.parquet     refused samples with their reasons
README.md                                   the card, with both configurations in its YAML
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, load_from_disk
from huggingface_hub import DatasetCard, DatasetCardData

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.hub.cards import CARD_NAME, check_label, check_no_loading_script, render_card
from eagle3_kimi.hub.dataset_summary import summarise_samples
from eagle3_kimi.hub.repository import Published, Repository
from eagle3_kimi.hub.staging import check_output_is_free, staging_folder
from eagle3_kimi.schema import SCHEMA_VERSION, validate

CONFIGS = ("complete", "quarantine")
SPLITS = ("train", "validation")

_MAX_FILE_BYTES = 500 << 20
"""Of Arrow data in one Parquet file, as `datasets` itself splits."""


@dataclass(frozen=True, kw_only=True)
class PulledDataset:
    """What `pull_dataset` wrote."""

    folder: Path
    complete: int
    quarantined: int


def push_dataset(
    path: Path, repo_id: str, *, tag: str, private: bool = True, licence: str | None = None, dry_run: Path | None = None
) -> Published:
    """Pushes the folder that `eagle3-kimi generate` wrote as one version of a data set repository.

    Args:
        path: holds `complete` and `quarantine`, both from `save_to_disk`.
        repo_id: created if absent.
        tag: of this version; never moved.
        private: of a repository that is created.
        licence: for the card; an identifier of the Hub such as `apache-2.0`.
        dry_run: write everything into this folder instead, without the Hub.

    Raises:
        DataError: a row is not reasoning-complete, or the repository holds another schema.
        HubError: the tag exists, or the Hub says no.
    """
    configs = open_samples(path)
    validate(configs["complete"])
    label = {"kind": "dataset", "schema_version": SCHEMA_VERSION}
    repository = Repository(repo_id, "dataset")
    head = None
    if dry_run is None:
        head = repository.begin_push(label, tag, private=private)
        if head.card is not None:
            check_features(head.card, features_of(configs))
    with staging_folder(dry_run) as folder:
        for name, splits in configs.items():
            write_parquet(splits, folder / name)
        card = build_card(configs, label, repo_id=repo_id, tag=tag, licence=licence)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        if head is None:
            return Published(repo_id=repo_id, tag=tag, commit="", folder=folder)
        owned = [f"{name}/*" for name in CONFIGS]
        commit = repository.upload_folder(folder, head, f"Samples, version {tag}", owned=owned)
    repository.create_tag(tag, commit)
    return Published(repo_id=repo_id, tag=tag, commit=commit)


def pull_dataset(repo_id: str, output: Path, *, tag: str) -> PulledDataset:
    """Pulls a version into `output`/complete and `output`/quarantine, as `generate` writes them; whole or not at all.

    Raises:
        DataError: another schema, a card that does not describe the files, or a row that is not reasoning-complete.
        HubError: no such tag, or the Hub cannot be reached and the version is not cached.
    """
    check_output_is_free(output)
    snapshot = Repository(repo_id, "dataset").download(tag)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as name:
        scratch = Path(name)
        configs = read_version(snapshot, scratch / "cache", repo_id=repo_id, tag=tag)
        for config, splits in configs.items():
            splits.save_to_disk(str(scratch / "samples" / config))
        if output.is_dir():
            output.rmdir()
        (scratch / "samples").replace(output)
        counts = {config: sum(map(len, splits.values())) for config, splits in configs.items()}
    return PulledDataset(folder=output, complete=counts["complete"], quarantined=counts["quarantine"])


def open_samples(path: Path) -> dict[str, DatasetDict]:
    """The two configurations of a folder on disk, without empty splits.

    Raises:
        UsageError: one of them is missing; refused samples belong to the data set.
        DataError: no sample is complete.
    """
    missing = [name for name in CONFIGS if not (path / name / "dataset_dict.json").is_file()]
    if missing:
        raise UsageError(
            f"{path} has no {' and no '.join(missing)} folder; give the folder that `eagle3-kimi generate -o` wrote"
        )
    opened = {name: load_from_disk(str(path / name)) for name in CONFIGS}
    filled = {
        name: DatasetDict({split: rows for split, rows in samples.items() if len(rows)})
        for name, samples in opened.items()
    }
    if not filled["complete"]:
        raise DataError(f"{path} holds no complete samples; there is nothing to push")
    return filled


def write_parquet(splits: Mapping[str, Dataset], folder: Path) -> None:
    """One or more Parquet files a split; their types are plain, so that any machine and the Hub's viewer read them."""
    for split, rows in splits.items():
        folder.mkdir(parents=True, exist_ok=True)
        count = max(1, -(-int(rows.data.nbytes) // _MAX_FILE_BYTES))
        for index in range(count):
            part = rows.shard(count, index, contiguous=True)
            part.to_parquet(folder / f"{split}-{index:05d}-of-{count:05d}.parquet")


def read_version(folder: Path, scratch: Path, *, repo_id: str, tag: str) -> dict[str, DatasetDict]:
    """Reads a snapshot, checked: label, columns against the card, every row.

    `scratch` holds the Arrow copy; a fresh folder each time, so no other version can be taken for this one.

    Raises:
        DataError: saying what is wrong with the version.
    """
    files = {name: sorted((folder / name).glob("*.parquet")) for name in CONFIGS}
    check_no_loading_script(repo_id, [file.name for file in folder.iterdir()])
    card_file = folder / CARD_NAME
    card = card_file.read_text(encoding="utf-8") if card_file.is_file() else None
    check_label(repo_id, tag, card, kind="dataset", schema_version=SCHEMA_VERSION)
    configs = {name: _load_parquet(files[name], scratch / name) for name in CONFIGS}
    check_features(str(card), features_of(configs))
    if not configs["complete"]:
        raise DataError(f"{repo_id} {tag} holds no complete samples")
    validate(configs["complete"])
    return configs


def features_of(configs: Mapping[str, DatasetDict]) -> dict[str, Features]:
    """Configuration -> features, where there are rows."""
    return {name: next(iter(splits.values())).features for name, splits in configs.items() if splits}


def check_features(card: str, features: Mapping[str, Features]) -> None:
    """The card's features must be those of the files: `datasets` believes the card, and then fails on the files.

    Args:
        card: text of the card.
        features: configuration -> features of its files.

    Raises:
        DataError: naming the columns that differ.
    """
    described = DatasetCard(card, ignore_metadata_errors=True).data.get("dataset_info") or []
    for info in [described] if isinstance(described, dict) else described:
        name = info.get("config_name", "default")
        told = Features._from_yaml_list(info.get("features") or [])
        came = features.get(name, told)
        differing = sorted(column for column in {**told, **came} if told.get(column) != came.get(column))
        if differing:
            raise DataError(
                f"the card describes other columns of {name} than the files have (differing: {', '.join(differing)}); "
                "push the data with the card of its own, into a repository of this schema"
            )


def build_card(
    configs: Mapping[str, DatasetDict], label: Mapping[str, Any], *, repo_id: str, tag: str, licence: str | None
) -> str:
    """The card, with configurations and features in its YAML."""
    features = features_of(configs)
    filled = {name: splits for name, splits in configs.items() if splits}
    data = DatasetCardData(
        license=licence,
        pretty_name=repo_id.split("/")[-1],
        task_categories=["text-generation"],
        tags=["eagle3", "speculative-decoding", "reasoning"],
        configs=[
            {
                "config_name": name,
                **({"default": True} if name == "complete" else {}),
                "data_files": [{"split": split, "path": f"{name}/{split}-*.parquet"} for split in splits],
            }
            for name, splits in filled.items()
        ],
        dataset_info=[{"config_name": name, "features": found._to_yaml_list()} for name, found in features.items()],
    )
    summary = summarise_samples(configs["complete"], configs["quarantine"])
    return render_card("dataset.md.jinja", data, label, repo_id=repo_id, tag=tag, licence=licence, **summary)


def _load_parquet(files: Sequence[Path], scratch: Path) -> DatasetDict:
    """Splits by file name."""
    by_split = {split: [str(file) for file in files if file.name.startswith(f"{split}-")] for split in SPLITS}
    return DatasetDict(
        {split: Dataset.from_parquet(found, cache_dir=str(scratch)) for split, found in by_split.items() if found}
    )
