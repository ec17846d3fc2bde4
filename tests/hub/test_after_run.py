"""`--push-to REPO --tag V` of the launched scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hub.after_run import PushOptions
from eagle3_kimi.launched import run_launched
from tests.hub.client import Client
from tests.hub.hub_state import Hub
from tests.training.toy import write_toy_run

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "train" / "train_drafter.py")


@pytest.mark.multiprocess
def test_the_main_process_alone_pushes_and_nobody_starts_for_nothing(client: Client, hub: Hub, tmp_path: Path) -> None:
    target, store = write_toy_run(tmp_path / "toy", samples=4)
    settings = {
        "target": str(target.path), "store": str(store), "output": str(tmp_path / "run"), "expected_world_size": 2,
        "max_steps": 0, "max_length": 64, "micro_batch_tokens": 64, "push_to": "me/drafter", "tag": "v1",
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    environment = {**os.environ, **hub.environment(client.home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def run(*launcher: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *launcher, SCRIPT, "--config", str(tmp_path / "run.yaml")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    config = str(ROOT / "accelerate_configs" / "cpu_2.yaml")
    done = run("-m", "accelerate.commands.launch", "--config_file", config)
    assert done.returncode == 0, done.stderr
    repo = hub.repos["model", "me/drafter"]
    assert repo.private
    assert list(repo.tags) == ["v1"]
    assert len(hub.uploads) == 1
    assert [path for _, path, _ in hub.requests].count("/api/repos/create") == 1

    (tmp_path / "run" / "training.json").unlink()
    again = run()
    assert again.returncode == 1
    assert "me/drafter has the tag v1 already" in again.stderr
    assert not (tmp_path / "run" / "training.json").exists()  # refused before the training


def test_a_stage_is_told_where_its_result_goes() -> None:
    told: list[object] = []
    options = ["--dataset", "samples", "--target", "tiny", "-o", "out", "--push-to", "me/features", "--tag", "v1"]
    run_launched((ExtractConfig, PushOptions), lambda *configs: told.extend(configs), "", options)
    assert told == [
        ExtractConfig(dataset=Path("samples"), target="tiny", output=Path("out")),
        PushOptions(push_to="me/features", tag="v1"),
    ]


def test_a_repository_without_a_tag_is_no_destination(capsys: pytest.CaptureFixture[str]) -> None:
    from eagle3_kimi.hub.after_run import extract_and_push

    options = ["--dataset", "samples", "--target", "tiny", "-o", "out", "--tag", "v1"]
    with pytest.raises(SystemExit, match="2"):
        run_launched((ExtractConfig, PushOptions), extract_and_push, "", options)
    assert "give both or neither" in capsys.readouterr().err
