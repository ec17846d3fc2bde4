"""A Hub on loopback: what `huggingface_hub` asks of one, over HTTP.

with running() as hub:
    ...  # a child process with hub.environment(home) pushes and pulls
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.hub_state import TOKEN, Hub, HubRefusal, Repo, is_large
from tests.hub.xet_store import XetStore

_KIND, _REPO, _REVISION = "(models|datasets)", "([^/]+/[^/]+)", "([^/]+)"


class HubRequests(BaseHTTPRequestHandler):
    """Finds the route of a request; each route is a method."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    @property
    def has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def answer(self) -> None:
        address = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            self.body = self._read_chunks()
        with self.hub.lock:
            self.hub.requests.append((self.command, address.path, self.has_token))
        try:
            for methods, pattern, route in ROUTES:
                match = re.fullmatch(pattern, address.path)
                if match and self.command in methods:
                    return route(self, *(unquote(group or "") for group in match.groups()))
            raise HubRefusal(404, "RouteNotFound", f"{self.command} {address.path}")
        except HubRefusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": str(refusal)}
            self.reply({"error": str(refusal)}, status=refusal.status, headers=headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def _read_chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def reply(self, value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass

    def find(self, kind: str, repo_id: str) -> Repo:
        """The repository, if the request may see it: a private one looks absent without a token."""
        repo = self.hub.repos.get(("dataset" if kind.startswith("dataset") else "model", repo_id))
        if repo is None or (repo.private and not self.has_token):
            raise HubRefusal(404 if self.has_token else 401, "RepoNotFound", "Repository not found")
        return repo

    def demand_token(self) -> None:
        if not self.has_token:
            raise HubRefusal(401, "Unauthorized", "Invalid username or password.")

    def who_am_i(self) -> None:
        self.demand_token()
        self.reply({"type": "user", "name": "me", "orgs": []})

    def create_repo(self) -> None:
        self.demand_token()
        given = json.loads(self.body)
        repo_id, repo_type = f"{given['organization']}/{given['name']}", given.get("type") or "model"
        url = f"{self.hub.address}/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
        try:
            self.hub.create(repo_type, repo_id, private=given.get("visibility") == "private")
        except HubRefusal as refusal:
            return self.reply({"error": str(refusal), "url": url}, status=refusal.status)
        self.reply({"url": url})

    def check_yaml(self) -> None:
        self.reply({"errors": [], "warnings": []})

    def repo_info(self, kind: str, repo_id: str, revision: str = "main") -> None:
        repo = self.find(kind, repo_id)
        commit = repo.resolve(revision or "main")
        self.reply(
            {
                "_id": "0", "id": repo_id, "sha": commit, "private": repo.private, "gated": repo.gated, "tags": [],
                "downloads": 0, "likes": 0, "disabled": False,
                "siblings": [{"rfilename": path} for path in repo.commits[commit]],
            }
        )  # fmt: skip

    def refs(self, kind: str, repo_id: str) -> None:
        repo = self.find(kind, repo_id)

        def listed(names: dict[str, str], where: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{where}/{n}", "targetCommit": c} for n, c in names.items()]

        self.reply({"branches": listed(repo.branches, "heads"), "tags": listed(repo.tags, "tags"), "converts": []})

    def tree(self, kind: str, repo_id: str, revision: str, folder: str = "") -> None:
        repo = self.find(kind, repo_id)
        files = repo.commits[repo.resolve(revision)]
        prefix = f"{folder}/" if folder else ""
        inside = {path: blob for path, blob in files.items() if path.startswith(prefix)}
        if self.query.get("recursive", "").lower() == "true":
            return self.reply([blob.describe(path) for path, blob in inside.items()])
        folders = {prefix + path[len(prefix) :].split("/")[0] for path in inside if "/" in path[len(prefix) :]}
        listed = [blob.describe(path) for path, blob in inside.items() if "/" not in path[len(prefix) :]]
        self.reply([*listed, *({"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders))])

    def paths_info(self, kind: str, repo_id: str, revision: str) -> None:
        repo = self.find(kind, repo_id)
        files = repo.commits[repo.resolve(revision)]
        is_json = "json" in self.headers.get("Content-Type", "")
        paths = json.loads(self.body)["paths"] if is_json else parse_qs(self.body.decode()).get("paths", [])
        found = [files[path].describe(path) for path in paths if path in files]
        folders = [path for path in paths if any(name.startswith(f"{path}/") for name in files)]
        self.reply([*found, *({"type": "directory", "path": path, "oid": "0" * 40} for path in folders)])

    def preupload(self, kind: str, repo_id: str, revision: str) -> None:
        repo = self.find(kind, repo_id)
        files = repo.commits[repo.resolve(revision)]
        modes = []
        for given in json.loads(self.body)["files"]:
            path, known = given["path"], files.get(given["path"])
            large = is_large(path, given["size"], base64.b64decode(given.get("sample") or ""))
            oid = known and (known.sha256 if known.large else known.oid)
            modes.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid})
        self.reply({"files": modes})

    def make_commit(self, kind: str, repo_id: str, revision: str) -> None:
        repo = self.find(kind, repo_id)
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        commit = self.hub.commit(repo, revision, lines)
        self.reply({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.address}/{repo_id}/commit/{commit}"})

    def make_tag(self, kind: str, repo_id: str, revision: str) -> None:
        repo, name = self.find(kind, repo_id), json.loads(self.body)["tag"]
        with self.hub.lock:
            if name in repo.tags:
                raise HubRefusal(409, "RefExists", f"Reference already exists: refs/tags/{name}")
            repo.tags[name] = repo.resolve(revision)
        self.reply({})

    def lfs_batch(self, kind: str, repo_id: str) -> None:
        self.find(kind, repo_id)
        objects = []
        for given in json.loads(self.body)["objects"]:
            answer: dict[str, Any] = {"oid": given["oid"], "size": given["size"], "authenticated": True}
            if given["oid"] not in self.hub.objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.address}/lfs/{given['oid']}", "header": {}}}
            objects.append(answer)
        self.reply({"transfer": "basic", "objects": objects})

    def xet_token(self, kind: str, repo_id: str, revision: str) -> None:
        self.find(kind, repo_id)
        self.reply({"casUrl": self.hub.xet.open_session(), "accessToken": "t", "exp": 2**40})

    def lfs_put(self, sha256: str) -> None:
        self.hub.receive(sha256, self.body)
        self.reply({})

    def resolve(self, kind: str, repo_id: str, revision: str, path: str) -> None:
        repo = self.find(kind, repo_id)
        if repo.gated and not self.has_token:
            raise HubRefusal(401, "GatedRepo", "Access to this repository is restricted")
        commit = repo.resolve(revision)
        blob = repo.commits[commit].get(path)
        if blob is None:
            raise HubRefusal(404, "EntryNotFound", "Entry not found")
        etag = blob.sha256 if blob.large else blob.oid
        self.reply(blob.content, headers={"X-Repo-Commit": commit, "ETag": f'"{etag}"'})


Route = tuple[tuple[str, ...], str, Callable[..., None]]
ROUTES: list[Route] = [
    (("GET",), "/api/whoami-v2", HubRequests.who_am_i),
    (("POST",), "/api/repos/create", HubRequests.create_repo),
    (("POST",), "/api/validate-yaml", HubRequests.check_yaml),
    (("GET",), f"/api/{_KIND}/{_REPO}/refs", HubRequests.refs),
    (("GET",), f"/api/{_KIND}/{_REPO}/revision/{_REVISION}", HubRequests.repo_info),
    (("GET",), f"/api/{_KIND}/{_REPO}/tree/{_REVISION}(?:/(.*))?", HubRequests.tree),
    (("POST",), f"/api/{_KIND}/{_REPO}/paths-info/{_REVISION}", HubRequests.paths_info),
    (("POST",), f"/api/{_KIND}/{_REPO}/preupload/{_REVISION}", HubRequests.preupload),
    (("POST",), f"/api/{_KIND}/{_REPO}/commit/{_REVISION}", HubRequests.make_commit),
    (("POST",), f"/api/{_KIND}/{_REPO}/tag/{_REVISION}", HubRequests.make_tag),
    (("GET",), f"/api/{_KIND}/{_REPO}/xet-write-token/{_REVISION}", HubRequests.xet_token),
    (("GET",), f"/api/{_KIND}/{_REPO}", HubRequests.repo_info),
    (("POST",), rf"/(datasets/)?{_REPO}\.git/info/lfs/objects/batch", HubRequests.lfs_batch),
    (("PUT",), "/lfs/([0-9a-f]{64})", HubRequests.lfs_put),
    (("GET", "HEAD"), f"/(datasets/)?{_REPO}/resolve/{_REVISION}/(.+)", HubRequests.resolve),
]


@contextmanager
def running() -> Iterator[Hub]:
    """Serves until the block ends, on a free port."""
    with tempfile.TemporaryDirectory(prefix="hub-") as folder, _serving(XetStore(Path(folder))) as hub:
        yield hub


@contextmanager
def _serving(xet: XetStore) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubRequests)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_port}", xet)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
