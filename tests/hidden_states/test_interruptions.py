"""A killed rank and a full disk: the run ends soon and says why, nothing indexed is lost, the rerun completes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.hidden_states import extract
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.extract import extract_hidden_states
from eagle3_kimi.hidden_states.store import FeatureStore, check_store
from eagle3_kimi.target import Target
from tests.hidden_states.random_target import AUX_LAYER_IDS, save_rows

ROOT = Path(__file__).parents[2]


def find_rank(rank: int, output: Path) -> int:
    """Process id of the launched process of that rank that writes to `output`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if str(output).encode() in command and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    while not file.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


TWO_REPLICAS = ["--engine", "transformers"]
ONE_REPLICA = ["--engine", "vllm", "--tensor-parallel-size", "2"]


@pytest.mark.multiprocess
@pytest.mark.kills
@pytest.mark.parametrize(
    ("replicas", "writers", "message"),
    [
        pytest.param(TWO_REPLICAS, 2, "another process of the run has died", id="two replicas"),
        # it waits for its peer outside of Python, so that only the launcher can end it, and tells why
        pytest.param(ONE_REPLICA, 1, "Signal 9 (SIGKILL)", id="one replica", marks=pytest.mark.vllm),
    ],
)
def test_a_killed_rank_stops_the_others_and_the_rerun_completes(
    random_target: Target, greedy_rows: list[dict], tmp_path: Path, replicas: list[str], writers: int, message: str
) -> None:
    rows = [{**row, "id": f"{row['id']}-{copy:02d}"} for copy in range(20) for row in greedy_rows]
    output = tmp_path / "store"
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/cpu_2.yaml"),
        str(ROOT / "train/extract_hidden_states.py"), "--output", str(output), "--target", str(random_target.path),
        "--dataset", str(save_rows(rows, tmp_path / "rows")), "--aux-layer-ids", str(list(AUX_LAYER_IDS)),
        *replicas,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    # a forward pass and a shard for every few samples
    slow = ["--max-batched-tokens", "128", "--max-tokens-in-flight", "128", "--max-shard-bytes", "1"]
    run = subprocess.Popen(
        [*command, *slow], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    for writer in range(writers):
        wait_for(output / f"features-r{writer:02d}-00001.json", run)
    os.kill(find_rank(1, output), signal.SIGKILL)
    _, messages = run.communicate(timeout=60)
    assert run.returncode != 0
    assert message in messages
    left = check_store(output)
    assert left.ok
    assert 2 * writers <= left.samples < len(rows)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stderr[-4000:]
    assert FeatureStore(output).ids == sorted(row["id"] for row in rows)
    assert check_store(output).ok


@contextmanager
def small_disk(folder: Path) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """A disk that can be filled up and made larger: a tmpfs where mounting is allowed, else a limit on file sizes."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        try:
            yield lambda: _resize(folder, _used_kilobytes(folder) + 64), lambda: _resize(folder, 65536)
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield (
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard)),
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def _used_kilobytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize // 1024


def _resize(folder: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(folder)], check=True)


def test_a_full_disk_loses_nothing_indexed_and_the_rerun_completes(
    random_target: Target, greedy_rows: list[dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExtractConfig(
        dataset=save_rows(greedy_rows[:5], tmp_path / "part"),
        target=str(random_target.path),
        output=tmp_path / "disk" / "store",
        aux_layer_ids=AUX_LAYER_IDS,
        engine="transformers",
        max_shard_bytes=1,
    )
    with small_disk(tmp_path / "disk") as (fill, make_room):
        extract_hidden_states(config)
        before = FeatureStore(config.output).ids
        whole = replace(config, dataset=save_rows(greedy_rows, tmp_path / "whole"))
        with monkeypatch.context() as others:
            others.setattr(extract, "check_free_space", lambda *_: fill())  # fills up after the disk was asked
            with pytest.raises(RunStopped, match="make room and run the same command again"):
                extract_hidden_states(whole)
        make_room()
        assert check_store(config.output).ok
        assert set(before) <= set(FeatureStore(config.output).ids)
        assert not [file for file in config.output.iterdir() if file.suffix == ".tmp"]
        assert extract_hidden_states(whole).skipped >= len(before)
        assert FeatureStore(config.output).ids == sorted(row["id"] for row in greedy_rows)
        assert check_store(config.output).ok
