"""The state of a Hub, in memory: repositories with commits and tags, and the store of large objects.

Revisions are immutable as Git's: a commit is a tree of path -> content, named by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tests.hub.xet_store import XetStore

TOKEN = "hf_" + "a1B2" * 8
LARGE = ("*.parquet", "*.safetensors")
"""Files that go to the object store, as the `.gitattributes` of a new repository says."""


class HubRefusal(Exception):
    """An answer with a status and the error code the client looks at."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Blob:
    """A file of a commit."""

    content: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """Git's name of the file: of its pointer, where it is large."""
        data = self.content
        if self.large:
            data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(data)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def describe(self, path: str) -> dict:
        info = {"type": "file", "path": path, "oid": self.oid, "size": len(self.content)}
        if self.large:
            info["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 130}
        return info


@dataclass
class Repo:
    """Commits and what names them."""

    private: bool
    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, tree: dict[str, Blob], parent: str = "") -> str:
        text = json.dumps([parent, len(self.commits), sorted((path, blob.oid) for path, blob in tree.items())])
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = tree
        self.branches["main"] = name
        return name

    def resolve(self, revision: str) -> str:
        name = self.branches.get(revision) or self.tags.get(revision) or revision
        if name not in self.commits:
            raise HubRefusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return name


class Hub:
    """The state of the server, and what a test looks at or arranges."""

    def __init__(self, address: str, xet: XetStore) -> None:
        self.address, self.xet = address, xet
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        """SHA-256 of each object that came, in order."""
        self.arrived = 0
        """Uploads that began."""
        self.requests: list[tuple[str, str, bool]] = []
        """Method, path, and whether a valid token came with it."""
        self.stall_at_upload: int | None = None
        """This upload, counted from 0, is answered once `released` is set; `stalled` says that it came."""
        self.stalled = threading.Event()
        self.released = threading.Event()

    def environment(self, home: Path) -> dict[str, str]:
        """For a child process whose cache is `home`."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # each object is one request, which a test can count and stall
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def create(self, repo_type: str, repo_id: str, *, private: bool = True, gated: bool = False) -> Repo:
        with self.lock:
            if (repo_type, repo_id) in self.repos:
                raise HubRefusal(409, "RepoExists", "You already created this repo")
            attributes = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LARGE)
            repo = self.repos[repo_type, repo_id] = Repo(private=private, gated=gated)
            repo.commit({".gitattributes": Blob(attributes.encode(), large=False)})
            return repo

    def commit(self, repo: Repo, revision: str, lines: list[dict]) -> str:
        """Applies the operations of a commit request to a branch."""
        with self.lock:
            head = repo.resolve(revision)
            tree = dict(repo.commits[head])
            for line in lines:
                key, value = line["key"], line["value"]
                if key == "header":
                    if value.get("parentCommit") not in (None, head):
                        raise HubRefusal(412, "PreconditionFailed", "A commit has happened since.")
                elif key == "file":
                    tree[value["path"]] = Blob(base64.b64decode(value["content"]), large=False)
                elif key == "lfsFile":
                    content = self.objects.get(value["oid"]) or self.xet.read(value["oid"], value["size"])
                    if content is None:
                        raise HubRefusal(400, "BadObject", f"object {value['oid']} was not uploaded")
                    tree[value["path"]] = Blob(content, large=True)
                else:
                    assert key == "deletedFile", key
                    del tree[value["path"]]
            return repo.commit(tree, head)

    def receive(self, sha256: str, content: bytes) -> None:
        """Keeps an uploaded object."""
        with self.changed:
            number, self.arrived = self.arrived, self.arrived + 1
            stall = number == self.stall_at_upload
            if stall:
                self.changed.wait_for(lambda: len(self.uploads) == number)  # they arrive side by side
                self.stalled.set()
        if stall:
            self.released.wait()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise HubRefusal(422, "BadObject", "the content has another digest")
        with self.changed:
            self.uploads.append(sha256)
            self.objects[sha256] = content
            self.changed.notify_all()


def is_large(path: str, size: int, sample: bytes) -> bool:
    return any(fnmatch(path, pattern) for pattern in LARGE) or size > 10 << 20 or b"\0" in sample
