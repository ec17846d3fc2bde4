from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts import RefusedRows, load_conversations, open_prompts, prompts_digest
from eagle3_kimi.prompts.lengths import TokenCounter

QUESTIONS = ["Name a colour.", "Name a bird.", "Name a river in Africa."]


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    rows = "".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(rows + '{"prompt": " "}\n')
    path = tmp_path / "mix.yaml"
    path.write_text("seed: 3\nsources:\n  - {name: questions, files: [questions.jsonl], count: 3}\n")
    return path


def test_a_mix_is_built_once_and_gives_its_conversations(mix: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text(json.dumps({"prompt": "Name a king."}))
    files = [mix, tmp_path / "more.jsonl"]
    opened = open_prompts(files, cache_dir=tmp_path / "cache")
    assert opened[1] == files[1]
    assert {c.prompt_text for c in load_conversations(opened)} == {*QUESTIONS, "Name a king."}
    opened[0].write_text("")  # a second build would fill it
    assert open_prompts(files, cache_dir=tmp_path / "cache") == opened
    assert opened[0].read_text() == ""


def test_the_digest_follows_content_and_not_names(mix: Path, tmp_path: Path, count_tokens: TokenCounter) -> None:
    first = prompts_digest([mix])
    assert prompts_digest([mix]) == first != prompts_digest([mix], count_tokens=count_tokens)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in (mix, tmp_path / "questions.jsonl"):
        (moved / file.name).write_bytes(file.read_bytes())
    assert prompts_digest([moved / "mix.yaml"]) == first
    with (moved / "questions.jsonl").open("a") as file:
        file.write('{"prompt": "Name a king."}\n')
    assert prompts_digest([moved / "mix.yaml"]) != first
    assert prompts_digest([moved / "questions.jsonl"]) != prompts_digest([tmp_path / "questions.jsonl"])
    with pytest.raises(UsageError, match=r"missing\.jsonl cannot be read"):
        prompts_digest([tmp_path / "missing.jsonl"])


def test_a_locked_revision_is_part_of_the_digest(tmp_path: Path) -> None:
    mix, lock = tmp_path / "mix.yaml", tmp_path / "mix.lock.json"
    mix.write_text("sources:\n  - {name: chat, hub: someone/something, count: 1}\n")
    digests = set()
    for commit in ("a" * 40, "b" * 40):
        lock.write_text(json.dumps({"version": 1, "revisions": {"someone/something": commit}}))
        digests.add(prompts_digest([mix]))
        assert json.loads(lock.read_text())["revisions"] == {"someone/something": commit}  # kept, not resolved again
    assert len(digests) == 2


def test_prompts_of_which_nothing_is_left_say_why(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": ""}\n{"prompt": " "}\n{"messages": []}\n')
    refused = RefusedRows()
    with pytest.raises(
        DataError, match=r"no conversation in .*x\.jsonl; 3 rows of prompts are refused\n  2 empty_user"
    ):
        list(load_conversations([file], on_refused=refused))
    assert dict(refused.by_reason) == {"empty_user_turn": 2, "no_user_turn": 1}
    assert (
        str(refused).splitlines()[1]
        == f"  2 empty_user_turn: {file}, row 1: messages[0].content: a user turn without text"
    )
