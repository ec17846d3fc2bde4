"""A mix that names a data set on a Hub: resolved once, locked beside the mix, and streamed at that revision for ever."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from eagle3_kimi.prompts import load_conversations
from tests.hub.client import Client
from tests.hub.hub_server import running
from tests.hub.hub_state import Blob, Repo


def commit_questions(repo: Repo, *texts: str) -> str:
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    return repo.commit({"train.jsonl": Blob(rows.encode(), large=False)}, repo.branches["main"])


def texts_of(folder: Path) -> set[str]:
    return {c.messages[0]["content"] for c in load_conversations([folder / "prompts.jsonl"])}


def test_the_first_use_locks_a_revision_that_later_uses_keep(tmp_path: Path) -> None:
    mix, lock = tmp_path / "mix.yaml", tmp_path / "mix.lock.json"
    mix.write_text(yaml.safe_dump({"seed": 0, "sources": [{"name": "chat", "hub": "someone/questions", "count": 2}]}))
    old = ["Why is the sky blue?", "How do I bake bread?"]
    with running() as hub:
        repo = hub.create("dataset", "someone/questions", private=False)
        revision = commit_questions(repo, *old)
        client = Client(hub, tmp_path / "home")
        client.do(["prompts", mix, "-o", tmp_path / "first"])
        assert json.loads(lock.read_text())["revisions"] == {"someone/questions": revision}
        newer = commit_questions(repo, "Which number is prime?", "Where does the Rhine end?")
        client.do(["prompts", mix, "-o", tmp_path / "second"])
        lock.unlink()
        client.do(["prompts", mix, "-o", tmp_path / "third"])
    assert json.loads(lock.read_text())["revisions"] == {"someone/questions": newer}
    assert texts_of(tmp_path / "first") == texts_of(tmp_path / "second") == set(old)
    assert not texts_of(tmp_path / "third") & set(old)
