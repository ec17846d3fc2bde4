"""The builder with vLLM, killed at random moments: the same data set, nothing twice, no engine left behind."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import eagle3_kimi
from tests.builders.conftest import count_attempts, rows_of, write_prompts
from tests.builders.test_interruptions import num_records

pytestmark = [pytest.mark.vllm, pytest.mark.kills]

NUM_KILLS, NUM_PROMPTS = 3, 12
_SCRIPT = """
import json, sys
import datasets, eagle3_kimi
datasets.disable_progress_bars()
datasets.load_dataset("kimi_reasoning", **json.loads(sys.argv[1]))
"""
"""As a person writes it: no `if __name__ == "__main__"`, which vLLM's processes would need by themselves."""


def test_killed_at_random_moments_the_data_set_is_the_same_and_no_engine_is_left(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "data_files": str(write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS)),
        "target": str(tiny_target),
        "engine": "vllm",
        "dtype": "float32",
        "temperature": 0.0,
        "max_tokens": 128,
        "max_model_len": 512,
        "max_num_seqs": 1,  # one after the other, so that there are moments between two samples
        "validation_fraction": 0.3,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the runs of this process start sooner
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    whole, killed = _places(options, tmp_path / "whole"), _places(options, tmp_path / "killed")
    expected = rows_of(eagle3_kimi.load_dataset("kimi_reasoning", **whole))
    attempts = count_attempts(_journal(whole))
    script = tmp_path / "load.py"
    script.write_text(_SCRIPT)
    rng, journals = random.Random(11), Path(killed["journal_dir"])
    for kill in range(NUM_KILLS):
        before = num_records(journals)
        with (tmp_path / "log").open("wb") as log:
            command = [sys.executable, str(script), json.dumps(killed)]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        if kill % 3 == 0:  # while the engine starts
            time.sleep(rng.uniform(2.0, 15.0))
        else:
            wanted = min(before + 1 + rng.randrange(max(1, len(attempts) // NUM_KILLS)), len(attempts) - 1)
            while process.poll() is None and num_records(journals) < wanted:
                time.sleep(0.002)
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(children, timeout=30)
        assert left == []
        assert num_records(journals) < len(attempts)  # it was killed while it worked
    assert num_records(journals) > 0
    assert rows_of(eagle3_kimi.load_dataset("kimi_reasoning", **killed)) == expected
    assert count_attempts(_journal(killed)) == dict.fromkeys(attempts, 1)
    assert sorted(_journal(killed).read_bytes().splitlines()) == sorted(_journal(whole).read_bytes().splitlines())


def _places(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**options, "journal_dir": str(folder / "journals"), "cache_dir": str(folder / "cache")}


def _journal(options: dict[str, Any]) -> Path:
    (path,) = Path(options["journal_dir"]).glob("*.jsonl")
    return path
