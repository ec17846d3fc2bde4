"""A repository on the Hub as pushing and pulling see it: commits, and tags that never move."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import httpx

from eagle3_kimi.errors import HubError, UsageError
from eagle3_kimi.hub.cards import CARD_NAME, check_same_label, read_label
from eagle3_kimi.hub.client_errors import hub_errors

logger = logging.getLogger(__name__)

RepoType = Literal["dataset", "model"]

_TAG = re.compile(r"[A-Za-z0-9][\w.-]*")
_NOT_CONTENT = (".gitattributes", ".gitignore", CARD_NAME, "LICENSE*")
"""What a repository that was just created by hand may hold."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Where a version went."""

    repo_id: str
    tag: str
    commit: str
    """The commit that the tag names; empty after a dry run."""
    folder: Path | None = None
    """What a dry run wrote."""

    def __str__(self) -> str:
        if self.folder is not None:
            return f"dry run: {self.folder} holds what would be pushed to {self.repo_id} as {self.tag}"
        return f"{self.repo_id} {self.tag} is commit {self.commit}"


@dataclass(frozen=True, kw_only=True)
class Head:
    """The state a push starts from."""

    commit: str
    card: str | None
    """Text of the card; None in a new repository."""
    digests: Mapping[str, str]
    """Path -> SHA-256 of each large file."""


class Repository:
    """One repository. Tokens are found by `huggingface_hub` (HF_TOKEN, `hf auth login`) and stay there."""

    def __init__(self, repo_id: str, repo_type: RepoType) -> None:
        self.repo_id, self.repo_type = repo_id, repo_type
        self._api = HfApi(library_name="eagle3-kimi")

    def check_tag_is_free(self, tag: str) -> None:
        """A version never changes: its tag names one commit for ever."""
        if not _TAG.fullmatch(tag):
            raise UsageError(f"--tag {tag!r} is no name for a version; give one like v1.2.0")
        commit = self.read_tags(missing_ok=True).get(tag)
        if commit is not None:
            raise HubError(
                f"{self.repo_id} has the tag {tag} already, at commit {commit}; a version is never moved: "
                "choose another tag"
            )

    def read_tags(self, *, missing_ok: bool = False) -> dict[str, str]:
        """Tag -> commit; none where there is no repository and `missing_ok`."""
        with hub_errors(self.repo_id):
            try:
                refs = self._api.list_repo_refs(self.repo_id, repo_type=self.repo_type)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                if missing_ok:
                    return {}
                raise
        return {ref.name: ref.target_commit for ref in refs.tags}

    def begin_push(self, label: Mapping[str, object], tag: str, *, private: bool) -> Head:
        """Creates the repository if it is absent, and refuses one that holds something else.

        Args:
            label: kind, schema version... of what will be pushed; the repository's card holds it.
            tag: of the new version; must be free.
            private: of a repository that is created; an existing public one is then refused.

        Raises:
            DataError: the repository holds another kind, another schema or files of someone else.
            HubError: the tag exists, the repository is public, or the Hub says no.
        """
        self.check_tag_is_free(tag)
        with hub_errors(self.repo_id):
            self._api.create_repo(self.repo_id, repo_type=self.repo_type, private=private, exist_ok=True)
            info = self._api.repo_info(self.repo_id, repo_type=self.repo_type)
            files = self._list_files(str(info.sha))
        if private and not info.private:
            raise HubError(f"{self.repo_id} is public; say --public, or push to a private repository")
        card = self._read_card(str(info.sha)) if CARD_NAME in files else None
        content = [path for path in files if not any(fnmatch(path, pattern) for pattern in _NOT_CONTENT)]
        check_same_label(self.repo_id, label, read_label(card), content)
        digests = {path: file.lfs.sha256 for path, file in files.items() if file.lfs is not None}
        return Head(commit=str(info.sha), card=card, digests=digests)

    def upload_folder(self, folder: Path, head: Head, message: str, *, owned: Sequence[str]) -> str:
        """Uploads a whole version, resuming what was interrupted, and returns its commit.

        `owned` are the patterns of the data files: those of an older version that this one lacks are deleted.
        """
        sizes = {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
        logger.info("%d files, %.1f MB to %s", len(sizes), sum(sizes.values()) / 1e6, self.repo_id)
        with hub_errors(self.repo_id):
            commit = self._api.upload_folder(
                repo_id=self.repo_id, repo_type=self.repo_type, folder_path=folder, commit_message=message,
                parent_commit=head.commit, delete_patterns=list(owned) or None,
            ).oid  # fmt: skip
        self.check_commit(str(commit), sizes, owned)
        return str(commit)

    def preupload(self, addition: CommitOperationAdd) -> None:
        """Uploads one large file; the commit that names it comes later."""
        with hub_errors(self.repo_id):
            self._api.preupload_lfs_files(self.repo_id, [addition], repo_type=self.repo_type)

    def commit(self, operations: Sequence[object], message: str, *, parent: str) -> str:
        """Commits on top of `parent`; the new commit, or `parent` where nothing changes."""
        with hub_errors(self.repo_id):
            return str(
                self._api.create_commit(
                    self.repo_id, operations, repo_type=self.repo_type, commit_message=message,  # type: ignore[arg-type]
                    parent_commit=parent,
                ).oid
            )  # fmt: skip

    def check_commit(self, commit: str, sizes: Mapping[str, int], owned: Sequence[str]) -> None:
        """The commit about to be tagged holds every file of the version, and no data file of another one."""
        with hub_errors(self.repo_id):
            files = {path: file.size for path, file in self._list_files(commit).items()}
        wrong = [path for path, size in sizes.items() if files.get(path) != size]
        wrong += [path for path in files if path not in sizes and any(fnmatch(path, pattern) for pattern in owned)]
        if wrong:
            raise HubError(
                f"commit {commit} of {self.repo_id} is not what was pushed ({', '.join(sorted(wrong)[:3])}); another "
                "push came in between. Nothing was tagged: run the same command again"
            )

    def create_tag(self, tag: str, commit: str) -> None:
        """Names the commit; the Hub refuses a tag that exists, so two pushes of one version cannot both win."""
        with hub_errors(self.repo_id):
            self._api.create_tag(self.repo_id, tag=tag, revision=commit, repo_type=self.repo_type)

    def find_commit(self, tag: str) -> str:
        """The commit that `tag` names on the Hub.

        Raises:
            HubError: no such tag, or no connection.
        """
        tags = self.read_tags()
        if tag not in tags:
            known = ", ".join(sorted(tags)) or "none"
            raise HubError(f"{self.repo_id} has no tag {tag}; it has {known}")
        return tags[tag]

    def download(self, tag: str) -> Path:
        """The snapshot of the commit that `tag` names; without a connection, the one cached under this very tag."""
        try:
            commit = self.find_commit(tag)
        except HubError as error:
            if not isinstance(error.__cause__, OfflineModeIsEnabled | httpx.TransportError):
                raise
            commit = ""
        with hub_errors(self.repo_id):
            folder = Path(
                snapshot_download(
                    self.repo_id, repo_type=self.repo_type, revision=tag, local_files_only=not commit
                )
            )  # fmt: skip
        if commit and folder.name != commit:
            raise HubError(f"the tag {tag} of {self.repo_id} names {commit}, but {folder.name} was read; try again")
        return folder

    def download_file(self, path: str, commit: str, folder: Path | None = None) -> Path:
        """One file of a commit, into the cache or straight into `folder`; an interrupted download goes on."""
        with hub_errors(self.repo_id):
            return Path(
                hf_hub_download(self.repo_id, path, repo_type=self.repo_type, revision=commit, local_dir=folder)
            )

    def list_paths(self, commit: str) -> list[str]:
        """Paths of all files of a commit."""
        with hub_errors(self.repo_id):
            return sorted(self._list_files(commit))

    def _list_files(self, commit: str) -> dict[str, RepoFile]:
        entries = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit, repo_type=self.repo_type)
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _read_card(self, commit: str) -> str:
        return self.download_file(CARD_NAME, commit).read_text(encoding="utf-8")


def check_destination(push_to: str | None, tag: str | None, repo_type: RepoType) -> None:
    """Before hours of work, refuses what would make the push at their end fail.

    Raises:
        UsageError: `--push-to` and `--tag` do not come together, or the tag is no name.
        HubError: no token, no connection, or the tag exists.
    """
    if (push_to is None) != (tag is None):
        raise UsageError("--push-to names the repository and --tag the version: give both or neither")
    if push_to is not None and tag is not None:
        with hub_errors(push_to):
            HfApi().whoami()
        Repository(push_to, repo_type).check_tag_is_free(tag)
