"""Feature stores over a real client and a loopback Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.manifest import StoreManifest, update_manifest
from eagle3_kimi.hidden_states.store import FeatureStore, check_store
from eagle3_kimi.hub.features import find_missing, list_shards, push_features
from tests.hub.client import Client
from tests.hub.hub_state import Blob, Hub
from tests.hub.stores import write_store

REPO = "me/features"
KEY = ("dataset", REPO)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", shards=5)


def test_push_is_resumed_and_pull_goes_on(client: Client, store: Path, hub: Hub, tmp_path: Path) -> None:
    push = ["push", "features", store, REPO, "--tag", "v1"]
    hub.stall_at_upload = 3
    with client.start(push) as process:
        assert hub.stalled.wait(120)
        process.kill()
    hub.stall_at_upload = None
    assert len(hub.uploads) == 3
    assert hub.repos[KEY].tags == {}

    out = tmp_path / "out"
    pull = ["pull", "features", REPO, "--tag", "v1", "-o", out]
    client.do(push, pull)
    assert sorted(hub.uploads) == sorted(shard.sha256 for shard in list_shards(store))  # each shard once
    pulled = FeatureStore(out)
    assert pulled.fingerprint == FeatureStore(store).fingerprint
    assert pulled.manifest == FeatureStore(store).manifest
    assert check_store(out).ok
    assert {file.name for file in out.iterdir()} == {file.name for file in store.iterdir()}

    # A damaged and a missing shard come again, the others stay; a store with more samples is a new version.
    damaged, missing, *kept = (out / shard.file.name for shard in list_shards(store))
    damaged.write_bytes(b"x")
    missing.unlink()
    times = [file.stat().st_mtime_ns for file in kept]
    write_store(store, shards=7)
    moved = list_shards(store)[-3].index_file  # its sample went to the other split: other index, same shard
    moved.write_text(moved.read_text().replace('"train"', '"validation"'))
    client.do(pull, ["push", "features", store, REPO, "--tag", "v2"], ["pull", *pull[1:4], "v2", "-o", tmp_path / "v2"])
    assert check_store(out).ok
    assert [file.stat().st_mtime_ns for file in kept] == times
    assert len(hub.uploads) == 7
    assert len(FeatureStore(tmp_path / "v2")) == 7
    assert len(FeatureStore(tmp_path / "v2", split="validation")) == 1
    assert len(hub.repos[KEY].commits[hub.repos[KEY].tags["v1"]]) == 5 * 2 + 3  # store.json, README, .gitattributes

    # On the way a shard changed: it is not taken for a shard of the store.
    repo = hub.repos[KEY]
    spoilt = {**repo.commits[repo.tags["v1"]], damaged.name: Blob(b"spoilt", large=True)}
    repo.tags["v1"] = repo.commit(spoilt)
    damaged.unlink()
    refused, other = client.run(
        pull, ["push", "features", write_store(tmp_path / "other", target="b"), REPO, "--tag", "v3"]
    )
    assert (refused.code, other.code) == (1, 1)
    assert "does not have the checksum of its index" in refused.output
    assert "holds target 'toy', this push has 'b'" in other.output


def test_states_without_a_passed_contract_are_refused(store: Path, tmp_path: Path) -> None:
    for contract, message in (
        (None, "has no contract check"),
        ({"passed": False, "fault": "shifted by one"}, "failed its contract check: shifted by one"),
    ):
        update_manifest(store, contract=contract)
        with pytest.raises(DataError, match=message):
            push_features(store, REPO, tag="v1", dry_run=tmp_path / "dry")


def test_a_damaged_shard_is_refused(store: Path) -> None:
    shard = list_shards(store)[0]
    shard.check()
    shard.file.write_bytes(b"x" * shard.bytes)
    with pytest.raises(DataError, match="checksum of its index"):
        shard.check()


def test_an_index_names_no_other_file(store: Path) -> None:
    index = json.loads(list_shards(store)[0].index_file.read_text())
    list_shards(store)[0].index_file.write_text(json.dumps({**index, "shard": "../other.safetensors"}))
    with pytest.raises(DataError, match=r"names the shard '\.\./other.safetensors'"):
        list_shards(store)


def test_only_shards_with_another_checksum_are_missing(store: Path) -> None:
    shards = list_shards(store)
    digests = {shards[0].file.name: shards[0].sha256, shards[1].file.name: "of an older version"}
    assert find_missing(shards, digests) == shards[1:]


def test_a_dry_run_is_a_store_with_a_card(store: Path, tmp_path: Path) -> None:
    push_features(store, REPO, tag="v1", dry_run=tmp_path / "dry")
    assert FeatureStore(tmp_path / "dry").fingerprint == FeatureStore(store).fingerprint
    card = (tmp_path / "dry" / "README.md").read_text()
    manifest = StoreManifest.load(store)
    for text in (
        "kind: features", "| shards | 5, ", "| samples | 5 |", "| aux layers (boundary numbering) | 1, 2, 3 |",
        f"| target revision | {manifest.target_revision} |", "| agreement | 0.99 |", "| passed | True |",
    ):  # fmt: skip
        assert text in card
