"""Killed at random moments, and asked by two processes at once: the data set is the same, nothing is done twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import eagle3_kimi
from tests.builders.conftest import NUM_KILLS, Generated, count_attempts, rows_of

_LOAD = """
import json, os, sys
import datasets, eagle3_kimi
datasets.disable_progress_bars()
samples = eagle3_kimi.load_dataset("kimi_reasoning", **json.loads(sys.argv[1]))
print(samples["train"]._fingerprint)
"""


def start(options: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _LOAD, json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def num_records(journals: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in journals.glob("*.jsonl"))


@pytest.mark.kills
def test_killed_at_random_moments_the_data_set_is_the_same(generated: Generated, tmp_path: Path) -> None:
    journals = tmp_path / "journals"
    options = generated.elsewhere(tmp_path / "cache", journal_dir=str(journals))
    rng, total = random.Random(7), len(count_attempts(generated.journal))
    kills = 0
    for kill in range(NUM_KILLS):
        process, before = start(options), num_records(journals)
        wanted = before + 1 + rng.randrange(max(1, (total - before) // (NUM_KILLS - kill)))
        while process.poll() is None and num_records(journals) < min(wanted, total - 1):
            time.sleep(0.005)
        process.kill()
        process.communicate()
        kills += num_records(journals) < total
    assert kills > NUM_KILLS / 2  # it was killed while it worked
    samples = eagle3_kimi.load_dataset("kimi_reasoning", **options)
    refused = eagle3_kimi.load_dataset("kimi_reasoning", "quarantine", **options)
    assert rows_of(samples) == rows_of(generated.samples)
    assert rows_of(refused) == rows_of(generated.quarantine)
    (journal,) = journals.glob("*.jsonl")
    assert count_attempts(journal) == dict.fromkeys(count_attempts(generated.journal), 1)
    assert sorted(journal.read_bytes().splitlines()) == sorted(generated.journal.read_bytes().splitlines())


@pytest.mark.multiprocess
def test_two_processes_at_once_generate_once(generated: Generated, tmp_path: Path) -> None:
    options = generated.elsewhere(tmp_path / "cache", journal_dir=str(tmp_path / "journals"))
    both = [start(options), start(options)]
    ends = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert len({stdout for stdout, _ in ends}) == 1  # one fingerprint
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    assert count_attempts(journal) == dict.fromkeys(count_attempts(generated.journal), 1)
    assert rows_of(eagle3_kimi.load_dataset("kimi_reasoning", **options)) == rows_of(generated.samples)
