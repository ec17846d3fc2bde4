"""Data sets over a real client and a loopback Hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, Features, Value, load_from_disk

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.features import build_features
from eagle3_kimi.hidden_states.samples import SampleReader
from eagle3_kimi.hub.dataset import check_features, push_dataset, read_version
from tests.hub.client import Client
from tests.hub.hub_state import TOKEN, Blob, Hub
from tests.rows import complete_row

REPO = "me/samples"
KEY = ("dataset", REPO)
Samples = Callable[..., Path]


def ids_of(folder: Path, config: str = "complete") -> dict[str, list[str]]:
    return {name: rows["id"][:] for name, rows in load_from_disk(str(folder / config)).items()}


def test_versions_stay_what_they_were(client: Client, samples: Samples, hub: Hub, tmp_path: Path) -> None:
    first, second = samples("first", "a", "b", "c"), samples("second", "d", "e", refused=0)
    pushed = client.run(
        ["push", "dataset", first, REPO, "--tag", "v1"],
        ["push", "dataset", second, REPO, "--tag", "v2"],
        ["push", "dataset", second, REPO, "--tag", "v1"],
    )
    assert [finished.code for finished in pushed] == [0, 0, 1]
    assert "has the tag v1 already" in pushed[2].output
    repo = hub.repos[KEY]
    assert repo.private
    assert repo.tags["v2"] == repo.branches["main"] != repo.tags["v1"]
    assert not [path for path in repo.commits[repo.tags["v2"]] if path.startswith("quarantine/")]

    # The first version by its tag, in a fresh process whose cache already holds the second one; then offline.
    pulls = [["pull", "dataset", REPO, "--tag", tag, "-o", tmp_path / tag] for tag in ("v2", "v1")]
    _, _, unknown, absent, taken = client.run(
        *pulls,
        ["pull", "dataset", REPO, "--tag", "v3", "-o", tmp_path / "none"],
        ["pull", "dataset", "me/nothing", "--tag", "v1", "-o", tmp_path / "none"],
        ["pull", "dataset", REPO, "--tag", "v1", "-o", tmp_path / "v1"],
    )
    assert (unknown.code, absent.code, taken.code) == (1, 1, 2)
    assert "has no tag v3; it has v1, v2" in unknown.output
    assert "no repository me/nothing" in absent.output
    assert ids_of(tmp_path / "v1") == ids_of(first)
    assert len(SampleReader(tmp_path / "v1" / "complete").refs) == 3  # what extraction reads
    assert ids_of(tmp_path / "v1", "quarantine") == {"train": ["refused-0"]}
    assert ids_of(tmp_path / "v2") == ids_of(second)
    offline = client.run(
        ["pull", "dataset", REPO, "--tag", "v1", "-o", tmp_path / "offline"],
        ["pull", "dataset", REPO, "--tag", "v3", "-o", tmp_path / "none"],
        ["push", "dataset", first, REPO, "--tag", "v4"],
        HF_HUB_OFFLINE="1",
    )
    assert [finished.code for finished in offline] == [0, 1, 1]
    assert ids_of(tmp_path / "offline") == ids_of(first)
    assert "not in the local cache" in offline[1].output
    assert "HF_HUB_OFFLINE forbids" in offline[2].output
    cached, unreachable = client.run(
        ["pull", "dataset", REPO, "--tag", "v2", "-o", tmp_path / "unreachable"],
        ["push", "dataset", first, REPO, "--tag", "v4"],
        HF_ENDPOINT="http://127.0.0.1:9",  # nobody listens there
    )
    assert (cached.code, unreachable.code) == (0, 1)
    assert ids_of(tmp_path / "unreachable") == ids_of(second)
    assert "the Hub cannot be reached" in unreachable.output

    # The token is nowhere.
    written = [blob.content for commit in repo.commits.values() for blob in commit.values()]
    written += [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(TOKEN.encode() in content for content in written)
    assert not any(TOKEN in finished.output for finished in [*pushed, *offline, unknown])


def test_any_machine_loads_what_xet_uploaded_with_plain_types(client: Client, samples: Samples, hub: Hub) -> None:
    client.do(["push", "dataset", samples("first", "a", "b"), REPO, "--tag", "v1"], HF_HUB_DISABLE_XET="0")
    assert hub.uploads == []  # not by LFS
    script = f"""import datasets, json
complete = datasets.load_dataset({REPO!r}, revision="v1")
refused = datasets.load_dataset({REPO!r}, "quarantine", revision="v1")
kinds = {{type(feature).__name__ for feature in complete["train"].features.values()}}
print(json.dumps([{{name: rows["id"][:] for name, rows in complete.items()}}, refused["train"]["reason"][:], sorted(kinds)]))
"""
    environment = {**client.hub.environment(client.home), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    ids, reasons, kinds = json.loads(done.stdout)
    assert ids == {"train": ["a"], "validation": ["b"]}
    assert reasons == ["empty_reasoning"]
    assert kinds == ["List", "Value", "dict"]


def test_a_killed_push_uploads_only_what_is_missing(client: Client, samples: Samples, hub: Hub) -> None:
    folder = samples("first", "a", "b")
    hub.stall_at_upload = 2  # of the three files
    with client.start(["push", "dataset", folder, REPO, "--tag", "v1"]) as process:
        assert hub.stalled.wait(120)
        process.kill()
    hub.stall_at_upload = None
    assert hub.repos[KEY].tags == {}
    before = list(hub.uploads)
    client.do(["push", "dataset", folder, REPO, "--tag", "v1"])
    assert len(before) == 2
    assert hub.uploads[:2] == before  # each file once
    assert len(set(hub.uploads)) == len(hub.uploads) == 3
    assert list(hub.repos[KEY].tags) == ["v1"]


def test_of_two_pushes_at_once_one_is_refused(client: Client, samples: Samples, hub: Hub) -> None:
    hub.stall_at_upload = 0
    push = ["--tag", "v1"]
    with client.start(["push", "dataset", samples("first", "a", "b"), REPO, *push]) as slow:
        assert hub.stalled.wait(120)
        hub.stall_at_upload = None
        client.do(["push", "dataset", samples("second", "c", "d", refused=0), REPO, *push])
        hub.released.set()
        ((code, output),) = json.loads(slow.communicate(timeout=300)[0])
    assert code == 1
    assert "another push to me/samples came in between" in output
    repo = hub.repos[KEY]
    assert repo.tags == {"v1": repo.branches["main"]}
    assert len(repo.commits) == 2  # the empty one, and the second push's


def test_what_is_refused(client: Client, samples: Samples, hub: Hub) -> None:
    folder = samples("first", "a", "b")
    public = hub.create("dataset", "me/public", private=False)
    scripted = hub.create("dataset", "me/script")
    scripted.commit({"script.py": Blob(b"import datasets", large=False)})
    foreign = hub.create("dataset", "me/foreign")
    foreign.commit({"data.csv": Blob(b"a", large=False)})
    other = hub.create("dataset", "me/other")
    other.commit({"README.md": Blob(b"---\neagle3_kimi:\n  kind: dataset\n  schema_version: 0\n---\n", large=False)})
    ways = {
        "me/public": "is public; say --public",
        "me/script": "loading script script.py",
        "me/foreign": "files that eagle3-kimi did not push (data.csv)",
        "me/other": "holds schema_version 0, this push has 1",
        "not a name": "is no repository name",
    }
    refused = client.run(*(["push", "dataset", folder, repo, "--tag", "v1"] for repo in ways))
    for finished, (repo, message) in zip(refused, ways.items(), strict=True):
        assert finished.code == (2 if repo == "not a name" else 1)
        assert message in finished.output
    assert all(repo.tags == {} for repo in (public, scripted, foreign, other))
    assert hub.uploads == []


def test_incomplete_samples_never_leave(samples: Samples, tmp_path: Path) -> None:
    folder = samples("first", "a", "b")
    rows = Dataset.from_list([complete_row(reasoning=" ")])  # plain features refuse nothing
    DatasetDict({"train": rows}).save_to_disk(folder / "blank" / "complete")
    (folder / "quarantine").rename(folder / "blank" / "quarantine")
    with pytest.raises(DataError, match="not reasoning-complete: row 0, field reasoning"):
        push_dataset(folder / "blank", REPO, tag="v1", dry_run=tmp_path / "dry")
    with pytest.raises(UsageError, match="no quarantine folder"):
        push_dataset(folder, REPO, tag="v1", dry_run=tmp_path / "dry")
    DatasetDict({}).save_to_disk(folder / "quarantine")
    DatasetDict({}).save_to_disk(folder / "complete")
    with pytest.raises(DataError, match="no complete samples"):
        push_dataset(folder, REPO, tag="v1", dry_run=tmp_path / "dry")


def test_a_dry_run_writes_the_whole_version(samples: Samples, tmp_path: Path) -> None:
    provenance = {
        **complete_row()["provenance"], "model": "/models/kimi", "revision": "5f1c", "engine": "vllm",
        "engine_version": "0.32.0", "temperature": 1.0, "top_p": 0.95, "max_tokens": 512, "template_hash": "77aa",
    }  # fmt: skip
    folder = samples("first", "a", "b", "c", provenance=provenance)
    published = push_dataset(folder, REPO, tag="v1", licence="apache-2.0", dry_run=tmp_path / "dry")
    assert published.commit == ""
    card = (tmp_path / "dry" / "README.md").read_text()
    for text in (
        "license: apache-2.0", "| 3 complete, 2 `train`, 1 `validation` |", "| target model | kimi |", "| vllm 0.32.0 |",
        "temperature 1, top-p 0.95, at most 512 tokens", "| empty_reasoning | 1 |", "| test | 3 |", "| 77aa |", "| 3 of 3 |",
        f'load_dataset("{REPO}", revision="v1")', "2 to 3               3  ████",
    ):  # fmt: skip
        assert text in card
    assert "/models" not in card
    configs = read_version(tmp_path / "dry", tmp_path / "scratch", repo_id=REPO, tag="v1")
    assert [row["id"] for rows in configs["complete"].values() for row in rows] == ["a", "b", "c"]
    with pytest.raises(UsageError, match="not empty"):
        push_dataset(folder, REPO, tag="v1", dry_run=tmp_path / "dry")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda card: card.replace("kind: dataset", "kind: features"), "has kind 'features', expected 'dataset'"),
        (lambda card: card.replace("schema_version: 1\n", "schema_version: 2\n"), "has schema_version 2, expected 1"),
        (lambda card: card.replace("name: reasoning\n", "name: thoughts\n"), "differing: reasoning, thoughts"),
        (lambda card: "# no metadata", "not pushed by eagle3-kimi"),
    ],
)
def test_a_version_that_is_not_what_its_card_says(
    samples: Samples, tmp_path: Path, break_it: Callable[[str], str], message: str
) -> None:
    push_dataset(samples("first", "a", "b"), REPO, tag="v1", dry_run=tmp_path / "dry")
    card = tmp_path / "dry" / "README.md"
    card.write_text(break_it(card.read_text()))
    with pytest.raises(DataError, match=message):
        read_version(tmp_path / "dry", tmp_path / "scratch", repo_id=REPO, tag="v1")


def test_a_card_of_other_columns_is_refused() -> None:
    card = "---\ndataset_info:\n  config_name: complete\n  features:\n  - name: id\n    dtype: string\n---\n"
    text = Features({"id": Value("string")})
    check_features(card, {"complete": text, "quarantine": build_features()})
    for features in (build_features(), Features({"id": Value("int64")})):
        with pytest.raises(DataError, match="other columns of complete"):
            check_features(card, {"complete": features})
