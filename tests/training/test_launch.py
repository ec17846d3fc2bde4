"""Launch files of GPU machines on CPU processes, and launches that must stop instead of falling back."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from eagle3_kimi.errors import UsageError
from eagle3_kimi.target import Target
from eagle3_kimi.training.launch import choose_tracker
from tests.training.launching import launch, start_launch
from tests.training.runs import assert_same_run, write_run_file

TWO = ["--num_processes", "2", "--mixed_precision", "no"]
CPU = {"ACCELERATE_USE_CPU": "true"}


@pytest.mark.multiprocess
def test_eight_gpus_file_resumes_a_run_of_one_process(
    toy: tuple[Target, Path], reference: Path, tmp_path: Path
) -> None:
    """DDP on two processes goes on from a checkpoint of one: the same global batches, the same curve."""
    output = tmp_path / "run"
    shutil.copytree(reference / "checkpoints" / "step-000003", output / "checkpoints" / "step-000003")
    shutil.copy(reference / "metrics.jsonl", output)
    shutil.copy(reference / "vocab_map.safetensors", output)
    file = write_run_file(tmp_path, toy, output=output, expected_world_size=2)
    code, printed = launch("8gpu.yaml", TWO, ["--config", str(file)], **CPU)
    assert code == 0, printed
    assert json.loads((output / "training.json").read_text())["world_size"] == 2
    assert_same_run(output, reference)


@pytest.mark.multiprocess
def test_two_machines_file_joins_two_launches(toy: tuple[Target, Path], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    file = write_run_file(tmp_path, toy, output=tmp_path / "run", expected_world_size=2, max_steps=1)
    machines = [
        start_launch(
            "2nodes_8gpu.yaml",
            [*TWO, "--machine_rank", rank, "--main_process_ip", "127.0.0.1", "--main_process_port", port],
            ["--config", str(file)],
            **CPU,
        )
        for rank in ("0", "1")
    ]
    printed = [machine.communicate(timeout=240)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(printed)
    assert json.loads((tmp_path / "run" / "training.json").read_text())["world_size"] == 2


@pytest.mark.multiprocess
def test_one_gpu_file_trains_in_bf16_near_the_fp32_run(
    toy: tuple[Target, Path], reference: Path, tmp_path: Path
) -> None:
    file = write_run_file(tmp_path, toy, output=tmp_path / "run", precision="bf16", max_steps=2)
    code, printed = launch("1gpu.yaml", ["--cpu"], ["--config", str(file)])
    assert code == 0, printed
    lines = [(folder / "metrics.jsonl").read_text().splitlines()[0] for folder in (tmp_path / "run", reference)]
    ours, theirs = (json.loads(line) for line in lines)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    assert ours["loss"] != theirs["loss"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("launch_file", "overrides", "environment", "sentence"),
    [
        ("8gpu_fsdp2.yaml", TWO, CPU, "the launch file asks for FSDP, what runs is MULTI_CPU"),
        ("1gpu.yaml", [], {}, "bf16 was asked for and no GPU is found"),
        ("cpu_1.yaml", [], {}, "expected 2 processes, 1 are running"),
    ],
)
def test_what_cannot_run_here_stops(
    toy: tuple[Target, Path],
    tmp_path: Path,
    launch_file: str,
    overrides: list[str],
    environment: dict[str, str],
    sentence: str,
) -> None:
    settings = {"precision": "bf16"} if launch_file == "1gpu.yaml" else {"expected_world_size": 2}
    file = write_run_file(tmp_path, toy, output=tmp_path / "run", **settings)
    code, printed = launch(launch_file, overrides, ["--config", str(file)], **environment)
    assert code != 0
    assert sentence in printed
    assert "Traceback" not in printed.split(sentence)[0]
    assert not (tmp_path / "run").exists()


def test_trackers_that_are_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = {"tensorboard"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    assert [choose_tracker(name) for name in (None, "tensorboard", "none")] == ["tensorboard", "tensorboard", "none"]
    with pytest.raises(UsageError, match="wandb is not installed: `pip install wandb`"):
        choose_tracker("wandb")
    installed.clear()
    assert choose_tracker(None) == "none"
