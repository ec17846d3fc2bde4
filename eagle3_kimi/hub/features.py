"""Feature stores on the Hub: shards go up and come down one by one, each with its checksum.

    store.json                          the manifest, committed first
    features-r00-00000.safetensors      a shard ...
    features-r00-00000.json             ... and its index, in the same commit
    README.md                           the card

A push that was interrupted goes on: a shard that the repository holds under its checksum is not read again. The
commits in between are not versions; the tag names the last one, after every file was compared.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, DatasetCardData

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.manifest import MANIFEST_NAME, STORE_SCHEMA_VERSION, StoreManifest
from eagle3_kimi.hidden_states.shards import file_digest, index_files, load_index
from eagle3_kimi.hidden_states.store import FeatureStore
from eagle3_kimi.hub.cards import CARD_NAME, check_label, public_name, render_card
from eagle3_kimi.hub.repository import Head, Published, Repository
from eagle3_kimi.hub.staging import staging_folder

logger = logging.getLogger(__name__)

_SHARDS = "features-r*"
_SHARDS_A_COMMIT = 50
"""The Hub limits commits an hour, and a commit that fails is uploaded again."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A finished shard of a store on this machine."""

    index_file: Path
    file: Path
    sha256: str
    bytes: int

    def check(self) -> None:
        """Raises `DataError` where the shard is not what its index says."""
        came = file_digest(self.file) if self.file.is_file() else "no file"
        if came != self.sha256:
            raise DataError(
                f"{self.file} does not have the checksum of its index (expected {self.sha256[:12]}, came {came[:12]}); "
                "delete both and get them again"
            )


def push_features(
    path: Path, repo_id: str, *, tag: str, private: bool = True, dry_run: Path | None = None
) -> Published:
    """Pushes a feature store as one version of a data set repository.

    Args:
        path: the store's folder.
        repo_id: created if absent.
        tag: of this version; never moved.
        private: of a repository that is created.
        dry_run: write the card and the manifest into this folder instead, with links to the shards.

    Raises:
        DataError: no passed contract, a damaged shard, or a repository of another target or schema.
        HubError: the tag exists, or the Hub says no.
    """
    store = FeatureStore(path)
    check_contract(store.manifest, path)
    label = {
        "kind": "features",
        "schema_version": STORE_SCHEMA_VERSION,
        "target": public_name(store.manifest.target),
        "target_revision": store.manifest.target_revision,
    }
    shards = list_shards(path)
    card = build_card(store, shards, label, repo_id=repo_id, tag=tag)
    if dry_run is not None:
        with staging_folder(dry_run) as folder:
            for file in [path / MANIFEST_NAME, *(f for shard in shards for f in (shard.file, shard.index_file))]:
                os.symlink(file.resolve(), folder / file.name)
            (folder / CARD_NAME).write_text(card, encoding="utf-8")
        return Published(repo_id=repo_id, tag=tag, commit="", folder=dry_run)
    repository = Repository(repo_id, "dataset")
    head = repository.begin_push(label, tag, private=private)
    commit = _upload(repository, head, path, shards, card, f"Features, version {tag}")
    repository.create_tag(tag, commit)
    return Published(repo_id=repo_id, tag=tag, commit=commit)


def pull_features(repo_id: str, output: Path, *, tag: str) -> FeatureStore:
    """Pulls a version into the folder `output`; shards that are there already, by checksum, are kept.

    Raises:
        DataError: another schema, a shard without its checksum, or `output` holds another store.
        HubError: no such tag, or no connection; run again and it goes on.
    """
    repository = Repository(repo_id, "dataset")
    commit = repository.find_commit(tag)
    card = repository.download_file(CARD_NAME, commit).read_text(encoding="utf-8")
    check_label(repo_id, tag, card, kind="features", schema_version=STORE_SCHEMA_VERSION)
    manifest = StoreManifest.load(repository.download_file(MANIFEST_NAME, commit).parent)
    check_contract(manifest, f"{repo_id} {tag}")
    names = [path for path in repository.list_paths(commit) if fnmatch(path, f"{_SHARDS}.json") and "/" not in path]
    output.mkdir(parents=True, exist_ok=True)
    _check_output(output, manifest, names)
    for number, name in enumerate(names, start=1):
        index_file = repository.download_file(name, commit)
        shard = read_shard(index_file, name, output)
        if not (shard.file.is_file() and file_digest(shard.file) == shard.sha256):
            shard.file.unlink(missing_ok=True)
            repository.download_file(shard.file.name, commit, output)
            shard.check()
        shard.index_file.write_bytes(index_file.read_bytes())  # last: a shard without its index does not exist
        logger.info("shard %d of %d is here", number, len(names))
    manifest.save(output)
    shutil.rmtree(output / ".cache", ignore_errors=True)  # where the client notes what it downloads
    return FeatureStore(output)


def check_contract(manifest: StoreManifest, name: Path | str) -> None:
    """Refuses states that were not proven to be the target's.

    Raises:
        DataError: there was no contract check, or it failed.
    """
    contract = manifest.contract
    if not (contract or {}).get("passed"):
        came = "has no contract check" if contract is None else f"failed its contract check: {contract.get('fault')}"
        raise DataError(f"the feature store {name} {came}; nobody should train on it: extract it again")


def list_shards(path: Path) -> list[Shard]:
    """The finished shards of a store."""
    return [read_shard(file, file.name, path) for file in index_files(path)]


def read_shard(index_file: Path, name: str, folder: Path) -> Shard:
    """The shard of the index `name`, read from `index_file`, as it lies or will lie in `folder`.

    Raises:
        DataError: the index is damaged, or names a file that is not its shard.
    """
    index = load_index(index_file)
    file = f"{Path(name).stem}.safetensors"
    if index.get("shard") != file:
        raise DataError(f"the index {name} names the shard {index.get('shard')!r}, expected {file!r}; get it again")
    return Shard(index_file=folder / name, file=folder / file, sha256=index["sha256"], bytes=index["bytes"])


def find_missing(shards: Sequence[Shard], digests: Mapping[str, str]) -> list[Shard]:
    """The shards that a repository does not hold; `digests` is its path -> SHA-256."""
    return [shard for shard in shards if digests.get(shard.file.name) != shard.sha256]


def build_card(
    store: FeatureStore, shards: Sequence[Shard], label: Mapping[str, Any], *, repo_id: str, tag: str
) -> str:
    """The card."""
    data = DatasetCardData(
        pretty_name=repo_id.split("/")[-1],
        tags=["eagle3", "speculative-decoding", "hidden-states"],
        viewer=False,
    )
    return render_card(
        "features.md.jinja", data, label, repo_id=repo_id, tag=tag, manifest=store.manifest, samples=len(store),
        tokens=sum(store.lengths), shards=len(shards), bytes=sum(shard.bytes for shard in shards),
    )  # fmt: skip


def _upload(repository: Repository, head: Head, path: Path, shards: Sequence[Shard], card: str, message: str) -> str:
    """What is small, then the missing shards, in few commits; the last one holds the version."""
    sizes = {file.name: file.stat().st_size for s in shards for file in (s.file, s.index_file)}
    files = repository.list_paths(head.commit)
    stale = [CommitOperationDelete(name) for name in files if name.startswith("features-r") and name not in sizes]
    missing = find_missing(shards, head.digests)
    small = [path / MANIFEST_NAME, *(shard.index_file for shard in shards if shard not in missing)]
    first = [CommitOperationAdd(file.name, str(file)) for file in small]  # the client leaves out what did not change
    card_file = CommitOperationAdd(CARD_NAME, card.encode())
    commit = repository.commit([card_file, *first, *stale], message, parent=head.commit)
    if len(missing) < len(shards):
        logger.info("%d of %d shards are in %s already", len(shards) - len(missing), len(shards), repository.repo_id)
    progress = _Progress(missing)
    waiting = iter(missing)
    while group := list(islice(waiting, _SHARDS_A_COMMIT)):
        additions = []
        for shard in group:
            shard.check()
            addition = CommitOperationAdd(shard.file.name, str(shard.file))
            addition.upload_info.sha256 = bytes.fromhex(shard.sha256)  # just read: not once more
            repository.preupload(addition)
            additions += [addition, CommitOperationAdd(shard.index_file.name, str(shard.index_file))]
            progress.advance(shard)
        commit = repository.commit(additions, f"{message}: {progress}", parent=commit)
    repository.check_commit(commit, {**sizes, MANIFEST_NAME: (path / MANIFEST_NAME).stat().st_size}, [_SHARDS])
    return commit


class _Progress:
    """Log lines: shards done, rate, time left."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._count, self._bytes = len(shards), sum(shard.bytes for shard in shards)
        self._done = self._done_bytes = 0
        self._since = time.monotonic()

    def advance(self, shard: Shard) -> None:
        self._done, self._done_bytes = self._done + 1, self._done_bytes + shard.bytes
        rate = self._done_bytes / max(time.monotonic() - self._since, 1e-9)
        left = (self._bytes - self._done_bytes) / max(rate, 1e-9)
        logger.info("%s uploaded, %.1f MB/s, %.0f s left", self, rate / 1e6, left)

    def __str__(self) -> str:
        return f"shard {self._done} of {self._count}"


def _check_output(output: Path, manifest: StoreManifest, names: Sequence[str]) -> None:
    if (output / MANIFEST_NAME).is_file():
        StoreManifest.load(output).check_same_store(manifest, output)
    foreign = [file.name for file in index_files(output) if file.name not in names]
    if foreign:
        raise DataError(f"{output} holds shards of another store ({foreign[0]}); give another folder")
