"""Whole runs: one process and two, interrupted and not, refused and reused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.target import Target
from eagle3_kimi.training.config import TrainConfig
from eagle3_kimi.training.exporting import export_checkpoint
from eagle3_kimi.training.trainer import compute_learning_rate, train_drafter
from tests.training.toy import ToyTarget, write_toy_run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
SETTINGS: dict[str, Any] = {
    "head_dim": 8,
    "ttt_steps": 3,
    "epochs": 6,
    "max_steps": 9,
    "batch_tokens": 160,
    "micro_batch_tokens": 160,
    "max_length": 100,
    "learning_rate": 3e-3,
    "checkpoint_every": 3,
    "keep_checkpoints": 3,
    "log_every": 1,
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    return write_toy_run(tmp_path_factory.mktemp("toy"))


def build_config(toy: tuple[Target, Path], output: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**SETTINGS, "target": str(toy[0].path), "store": toy[1], "output": output, **changes})


@pytest.fixture(scope="module")
def reference(toy: tuple[Target, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    output = tmp_path_factory.mktemp("runs") / "reference"
    train_drafter(build_config(toy, output))
    return output


def read_losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, 10))
    return losses


def assert_same_run(output: Path, reference: Path) -> None:
    torch.testing.assert_close(torch.tensor(read_losses(output)), torch.tensor(read_losses(reference)))
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (output, reference))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_run_writes_what_it_says(reference: Path) -> None:
    summary = json.loads((reference / "training.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["ttt_steps"]) == (9, 1, 3)
    assert summary["evaluated_on"] == "validation"
    assert summary["simulated_acceptance_length"] == pytest.approx(1 + sum(summary["acceptance"]))
    assert sorted(path.name for path in (reference / "checkpoints").iterdir()) == [
        "step-000003",
        "step-000006",
        "step-000009",
    ]
    losses = read_losses(reference)
    assert losses[-1] < losses[0]
    assert yaml.safe_load((reference / "config.yaml").read_text())["ttt_steps"] == 3


def test_four_micro_batches_equal_one(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    train_drafter(build_config(toy, tmp_path / "run", micro_batch_tokens=40, max_length=40))
    assert_same_run(tmp_path / "run", reference)


def test_two_processes_equal_one(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    """Real gloo processes, with different numbers of supervised tokens on each."""
    settings = {**SETTINGS, "target": str(toy[0].path), "store": str(toy[1]), "expected_world_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(ROOT / "accelerate_configs/cpu_2.yaml"), str(ROOT / "train"), "drafter"),
            *("--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run")),
        ],
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
    )
    assert json.loads((tmp_path / "run" / "training.json").read_text())["world_size"] == 2
    assert_same_run(tmp_path / "run", reference)


def test_killed_and_resumed_twice_equals_uninterrupted(
    toy: tuple[Target, Path], reference: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    settings = {**SETTINGS, "target": str(toy[0].path), "store": str(toy[1]), "output": str(output)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    for enough in ("step-000003", "step-000006"):
        command = [sys.executable, str(ROOT / "train/train_drafter.py"), "--config", str(tmp_path / "run.yaml")]
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while not (output / "checkpoints" / enough).exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (output / "training.json").exists()
    train_drafter(build_config(toy, output))
    assert_same_run(output, reference)


def test_a_finished_run_is_reused(toy: tuple[Target, Path], reference: Path) -> None:
    written = (reference / "training.json").stat().st_mtime_ns
    summary = train_drafter(build_config(toy, reference))
    assert summary["steps"] == 9
    assert (reference / "training.json").stat().st_mtime_ns == written


def test_another_run_does_not_resume_here(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    shutil.copytree(reference / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(UsageError, match="belongs to a run with other data"):
        train_drafter(build_config(toy, tmp_path / "run", learning_rate=1e-3))


def test_a_checkpoint_exports_what_the_run_exported(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    """Without the run's store and settings, and the same from the whole file that FSDP saves."""
    step = tmp_path / "step-000009"
    shutil.copytree(reference / "checkpoints" / step.name, step)
    assert export_checkpoint(reference, tmp_path / "newest").name == step.name
    assert export_checkpoint(step, tmp_path / "one") == step
    torch.save(load_file(step / "model.safetensors"), step / "pytorch_model_fsdp.bin")
    (step / "model.safetensors").unlink()
    export_checkpoint(step, tmp_path / "whole", target=str(toy[0].path))
    for folder in ("newest", "one", "whole"):
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / folder / file).read_bytes() == (reference / "export" / file).read_bytes()
    export_checkpoint(step, tmp_path / "spec", format="speculators")
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "spec" / "model.safetensors")


def test_a_checkpoint_that_cannot_be_exported(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")
    other = ToyTarget(seed=1).save(tmp_path / "other")
    with pytest.raises(DataError, match="was trained for"):
        export_checkpoint(reference, tmp_path / "out", target=str(other.path))
    shutil.copytree(reference / "checkpoints" / "step-000009", tmp_path / "step-000009")
    (tmp_path / "step-000009" / "model.safetensors").unlink()
    with pytest.raises(DataError, match="FULL_STATE_DICT"):
        export_checkpoint(tmp_path, tmp_path / "out")
    (tmp_path / "step-000009" / "trainer_state.json").write_text('{"global_step": 9}')
    with pytest.raises(DataError, match="another trainer's checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")


def test_no_steps_export_the_untrained_drafter(toy: tuple[Target, Path], tmp_path: Path) -> None:
    summary = train_drafter(build_config(toy, tmp_path / "run", max_steps=0))
    assert (summary["steps"], summary["supervised_tokens"]) == (0, 0)
    assert (tmp_path / "run" / "export" / "config.json").is_file()


@pytest.mark.parametrize("contract", [{"passed": False, "agreement": 0.2}, None])
def test_unproven_states_are_refused(tmp_path: Path, contract: dict | None) -> None:
    target, store = write_toy_run(tmp_path / "toy", samples=3)
    manifest = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**manifest, "contract": contract}))
    with pytest.raises(DataError, match="contract"):
        train_drafter(build_config((target, store), tmp_path / "run"))


def test_a_wrong_launch_stops(toy: tuple[Target, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected 2 processes, 1 are running"):
        train_drafter(build_config(toy, tmp_path / "run", expected_world_size=2))
    with pytest.raises(UsageError, match="precision"):
        train_drafter(build_config(toy, tmp_path / "run", precision="bf16"))
    with pytest.raises(UsageError, match="max_length"):
        build_config(toy, tmp_path / "run", max_length=1000)


def test_the_rate_depends_on_the_step_alone(toy: tuple[Target, Path], tmp_path: Path) -> None:
    config = build_config(toy, tmp_path, learning_rate=1.0, warmup_ratio=0.1)
    assert [compute_learning_rate(step, 20, config) for step in (1, 2, 11, 20)] == pytest.approx([0.5, 1.0, 0.5, 0.0])
