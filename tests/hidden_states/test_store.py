"""The feature store on disk: what goes in comes out, and nothing wrong gets in or stays unseen."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_kimi.errors import DataError, RunStopped
from eagle3_kimi.hidden_states import writer as writer_module
from eagle3_kimi.hidden_states.recovery import recover_store
from eagle3_kimi.hidden_states.store import (
    FeatureFormat,
    FeatureSample,
    FeatureStore,
    FeatureStoreWriter,
    StoreManifest,
    check_store,
)
from eagle3_kimi.protocol import Span, SpanKind

MANIFEST = StoreManifest(
    target="t", target_revision="r1", hidden_size=4, num_layers=4, vocab_size=50, aux_layer_ids=(1, 2, 3),
    dtype="float32", format=FeatureFormat(aux_dtype="fp32", targets="state"), dataset_fingerprint="d",
    protocol="tiny-kimi", contract={"passed": True, "agreement": 1.0},
)  # fmt: skip


def make_sample(name: str, *, length: int = 9, prompt: int = 3, split: str = "train") -> FeatureSample:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    rows = length - 1 - prompt
    return FeatureSample(
        id=name,
        split=split,
        token_ids=torch.randint(50, (length,), generator=generator),
        num_prompt_tokens=prompt,
        spans=(Span(SpanKind.REASONING, 0, 2), Span(SpanKind.ANSWER, 3, 5)),
        aux_hidden_states=torch.randn(length - 1, 12, generator=generator),
        final_hidden_states=torch.randn(rows, 4, generator=generator),
        target_argmax=torch.randint(50, (rows,), generator=generator),
    )


def write(path: Path, names: list[str], **arguments: int) -> None:
    with FeatureStoreWriter(path, MANIFEST, **arguments) as writer:
        for name in names:
            writer.add(make_sample(name))


def assert_same(came: FeatureSample, expected: FeatureSample) -> None:
    assert (came.id, came.split, came.spans) == (expected.id, expected.split, expected.spans)
    assert came.num_prompt_tokens == expected.num_prompt_tokens
    for name in ("token_ids", "aux_hidden_states", "final_hidden_states", "target_argmax"):
        assert torch.equal(getattr(came, name), getattr(expected, name)), name


def test_samples_come_back_sorted_by_id_whoever_wrote_them(tmp_path: Path) -> None:
    write(tmp_path, ["c", "a"], rank=1)
    write(tmp_path, ["b"], rank=0)
    store = FeatureStore(tmp_path)
    assert store.ids == ["a", "b", "c"]
    assert store.lengths == [9, 9, 9]
    for came, name in zip(store, "abc", strict=True):
        assert_same(came, make_sample(name))


def test_split_selects(tmp_path: Path) -> None:
    with FeatureStoreWriter(tmp_path, MANIFEST) as writer:
        writer.add(make_sample("a"))
        writer.add(make_sample("b", split="validation"))
    assert FeatureStore(tmp_path, split="validation").ids == ["b"]
    assert FeatureStore(tmp_path, split="train").ids == ["a"]


def test_shards_are_cut_by_size_and_numbered_on_after_a_restart(tmp_path: Path) -> None:
    write(tmp_path, ["a", "b"], max_shard_bytes=1)
    write(tmp_path, ["c"], max_shard_bytes=1)
    names = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert names == [f"features-r00-0000{n}.safetensors" for n in range(3)]
    with FeatureStoreWriter(tmp_path, MANIFEST, rank=5) as other, pytest.raises(DataError, match="already"):
        other.add(make_sample("c"))


def test_bfloat16_states_come_back_as_they_were(tmp_path: Path) -> None:
    sample = make_sample("a")
    sample = replace(
        sample,
        aux_hidden_states=sample.aux_hidden_states.bfloat16(),
        final_hidden_states=sample.final_hidden_states.bfloat16(),
    )
    with FeatureStoreWriter(
        tmp_path, replace(MANIFEST, format=FeatureFormat(aux_dtype="bf16", targets="state"))
    ) as writer:
        writer.add(sample)
    assert_same(FeatureStore(tmp_path)[0], sample)


@pytest.mark.parametrize(
    ("field", "value"),
    [("target_revision", "r2"), ("target", "u"), ("aux_layer_ids", (1, 2, 4)), ("dtype", "bfloat16")],
)
def test_a_mixed_store_is_never_made(tmp_path: Path, field: str, value: object) -> None:
    write(tmp_path, ["a"])
    with pytest.raises(DataError, match=field):
        FeatureStoreWriter(tmp_path, replace(MANIFEST, **{field: value}))
    assert FeatureStore(tmp_path).manifest == MANIFEST


def test_bad_samples_are_refused(tmp_path: Path) -> None:
    good = make_sample("a")
    nan = good.aux_hidden_states.clone()
    nan[2, 1] = torch.nan
    infinite = good.final_hidden_states.clone()
    infinite[0, 0] = torch.inf
    outside = good.token_ids.clone()
    outside[1] = 50
    bad = {
        "NaN": replace(good, aux_hidden_states=nan),
        "infinite": replace(good, final_hidden_states=infinite),
        "vocabulary": replace(good, token_ids=outside),
        "aux_hidden_states has shape": replace(good, aux_hidden_states=good.aux_hidden_states[1:]),
        "final_hidden_states has shape": replace(good, final_hidden_states=good.final_hidden_states[1:]),
        "prompt tokens": replace(good, num_prompt_tokens=9),
        "float64": replace(good, aux_hidden_states=good.aux_hidden_states.double()),
    }
    with FeatureStoreWriter(tmp_path, MANIFEST) as writer:
        for message, sample in bad.items():
            with pytest.raises(DataError, match=message):
                writer.add(sample)
        writer.add(good)
        with pytest.raises(DataError, match="already"):
            writer.add(good)
    assert FeatureStore(tmp_path).ids == ["a"]


def test_a_shard_without_its_index_does_not_exist(tmp_path: Path) -> None:
    write(tmp_path, ["a", "b"], max_shard_bytes=1)
    (tmp_path / "features-r00-00001.json").unlink()
    assert FeatureStore(tmp_path).ids == ["a"]
    assert check_store(tmp_path).leftovers == ("features-r00-00001.safetensors",)
    write(tmp_path, ["b"], max_shard_bytes=1)  # takes the number again
    assert FeatureStore(tmp_path).ids == ["a", "b"]
    assert check_store(tmp_path).leftovers == ()


def test_check_names_damaged_shards_and_what_was_lost(tmp_path: Path) -> None:
    write(tmp_path, ["a", "b", "c", "d"], max_shard_bytes=1)
    assert check_store(tmp_path).ok
    assert check_store(tmp_path).samples == 4
    flipped = tmp_path / "features-r00-00000.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-3] ^= 1
    flipped.write_bytes(content)
    torn = tmp_path / "features-r00-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-5])
    (tmp_path / "features-r00-00002.safetensors").unlink()
    report = check_store(tmp_path)
    assert not report.ok
    assert report.lost_ids == ("a", "b", "c")
    assert "checksum" in report.damaged[flipped.name]
    assert "bytes" in report.damaged[torn.name]
    assert "missing" in report.damaged["features-r00-00002.safetensors"]


def test_an_id_in_two_shards_is_found(tmp_path: Path) -> None:
    write(tmp_path, ["a"])
    for suffix in ("json", "safetensors"):
        source = tmp_path / f"features-r00-00000.{suffix}"
        text = (
            source.read_bytes().replace(b"features-r00", b"features-r01") if suffix == "json" else source.read_bytes()
        )
        (tmp_path / f"features-r01-00000.{suffix}").write_bytes(text)
    with pytest.raises(DataError, match="twice"):
        FeatureStore(tmp_path)
    assert not check_store(tmp_path).ok


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    write(tmp_path / "x", ["a", "b"])
    write(tmp_path / "y", ["a", "b"])
    write(tmp_path / "z", ["a", "c"])
    prints = [FeatureStore(tmp_path / name).fingerprint for name in "xyz"]
    assert prints[0] == prints[1] != prints[2]


def test_what_was_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    large = [make_sample(name, length=200_000) for name in "abcdefghijklmnopqrst"]  # 12 MB of states each
    with FeatureStoreWriter(tmp_path, MANIFEST, max_shard_bytes=40 << 20) as writer:
        for sample in large:
            writer.add(sample)
    store, before = FeatureStore(tmp_path), read_file_backed_megabytes()
    first = store[0]
    sizes = []
    for sample in store:
        float(sample.aux_hidden_states.sum() + sample.final_hidden_states.sum())
        sizes.append(read_file_backed_megabytes() - before)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) > 250 << 20
    assert max(sizes) < 200
    assert_same(first, large[0])  # its map was closed meanwhile


def read_file_backed_megabytes() -> float:
    """Resident memory of this process that mirrors files (Linux)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) / 1024


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ["a"])
    manifest = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(DataError, match="schema_version 99"):
        FeatureStore(tmp_path)


def test_a_full_disk_loses_nothing_indexed(tmp_path: Path) -> None:
    write(tmp_path, ["a"])
    size = (tmp_path / "features-r00-00000.safetensors").stat().st_size
    writer = FeatureStoreWriter(tmp_path, MANIFEST, max_shard_bytes=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # a larger file fails to be written, as on a full disk
    try:
        with pytest.raises(RunStopped, match="make room"):
            writer.add(make_sample("large", length=300))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert FeatureStore(tmp_path).ids == ["a"]
    assert check_store(tmp_path).ok
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".tmp"]
    write(tmp_path, ["large"])
    assert FeatureStore(tmp_path).ids == ["a", "large"]


def test_a_shard_of_many_parts_is_like_one_of_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:03d}" for number in range(100)]
    write(tmp_path / "whole", names)
    monkeypatch.setattr(writer_module, "_BYTES_AT_ONCE", 3000)  # two samples
    write(tmp_path / "parts", names, max_shard_bytes=40_000)
    for shard in (tmp_path / "parts").glob("*.safetensors"):
        named = load_file(shard)  # by the library alone
        assert {tensor.data_ptr() % tensor.element_size() for tensor in named.values()} == {0}
    for one, other in zip(FeatureStore(tmp_path / "whole"), FeatureStore(tmp_path / "parts"), strict=True):
        assert_same(one, other)
    assert check_store(tmp_path / "parts").ok
    sizes = [file.stat().st_size for file in (tmp_path / "parts").glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) <= 42_000


def test_a_shard_ends_when_its_header_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_BYTES_AT_ONCE", 3000)
    monkeypatch.setattr(writer_module, "_MOST_HEADER_BYTES", 12_000)
    names = [f"{number:03d}" for number in range(100)]
    write(tmp_path, names)
    assert FeatureStore(tmp_path).ids == names
    headers = [int.from_bytes(file.read_bytes()[:8], "little") for file in tmp_path.glob("*.safetensors")]
    assert len(headers) > 2
    assert max(headers) <= 12_000


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from tests.hidden_states.test_store import MANIFEST, make_sample
from eagle3_kimi.hidden_states import shards, writer
from eagle3_kimi.hidden_states.store import FeatureStoreWriter
writer._BYTES_AT_ONCE = 2000
if sys.argv[2] == "in_index":  # while a digest is computed
    shards.file_digest = lambda _: os.kill(os.getpid(), signal.SIGKILL)
store = FeatureStoreWriter(Path(sys.argv[1]), MANIFEST, max_shard_bytes=int(sys.argv[3]))
for number in range(100000):
    store.add(make_sample(f"{number:06d}"))
    print(number, flush=True)
"""


def kill_writer(folder: Path, *, when: str, max_shard_bytes: int, after: int = 0) -> int:
    """Samples that a writer had taken when it was killed."""
    arguments = [sys.executable, "-c", KILLED_WRITER, str(folder), when, str(max_shard_bytes)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    lines = 0
    for line in process.stdout:
        lines = int(line) + 1
        if when == "in_add" and lines == after:
            process.send_signal(signal.SIGKILL)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return lines


def test_a_killed_writer_loses_the_shard_it_was_filling(tmp_path: Path) -> None:
    taken = kill_writer(tmp_path, when="in_add", max_shard_bytes=10_000, after=50)
    assert check_store(tmp_path).ok
    recover_store(tmp_path)
    report = check_store(tmp_path)
    assert report.ok
    assert report.leftovers == ()
    samples_a_shard = max(len(json.loads(file.read_text())["samples"]) for file in tmp_path.glob("features-*.json"))
    assert 1 < samples_a_shard < 20
    assert taken - report.samples <= samples_a_shard
    for sample in FeatureStore(tmp_path):
        assert_same(sample, make_sample(sample.id))


def test_a_shard_whose_digest_was_not_computed_is_not_lost(tmp_path: Path) -> None:
    kill_writer(tmp_path, when="in_index", max_shard_bytes=10_000)
    whole = list(tmp_path.glob("features-*.safetensors"))
    assert whole
    assert FeatureStore(tmp_path).ids == []
    recover_store(tmp_path)
    report = check_store(tmp_path)
    assert report.ok
    assert report.leftovers == ()
    assert report.shards == len(whole)
    assert_same(FeatureStore(tmp_path)[0], make_sample("000000"))


def test_what_is_not_whole_gets_no_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, ["a", "b", "c"], max_shard_bytes=1)
    torn, changed, twice = (tmp_path / f"features-r00-0000{number}.safetensors" for number in range(3))
    torn.write_bytes(torn.read_bytes()[:-5])
    content = bytearray(changed.read_bytes())
    content[-8:] = b"\xff" * 8  # token ids outside the vocabulary
    changed.write_bytes(content)
    for shard in (torn, changed):
        shard.with_suffix(".json").unlink()
    shutil.copy(twice, tmp_path / "features-r01-00000.safetensors")
    recover_store(tmp_path)
    assert FeatureStore(tmp_path).ids == ["c"]
    assert changed.name in caplog.text


def test_recovery_of_a_folder_that_is_no_store_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / ".mine.tmp").write_text("mine")
    recover_store(tmp_path)
    recover_store(tmp_path / "absent")
    assert (tmp_path / ".mine.tmp").exists()
