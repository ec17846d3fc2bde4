"""Runs on the toy target, and what makes two of them the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eagle3_kimi.target import Target
from eagle3_kimi.training.config import TrainConfig

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
    "tracker": "none",
}


def build_config(toy: tuple[Target, Path], output: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**SETTINGS, "target": str(toy[0].path), "store": toy[1], "output": output, **changes})


def write_run_file(folder: Path, toy: tuple[Target, Path], *, output: Path, **changes: Any) -> Path:
    """The same as a file for `--config`."""
    settings = {**SETTINGS, "target": str(toy[0].path), "store": str(toy[1]), "output": str(output), **changes}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def read_losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, 10))
    return losses


def assert_same_run(output: Path, reference: Path, *, loss_rtol: float = 1e-5, atol: float = 1e-4) -> None:
    """The same losses at every step and the same exported weights, to float tolerance."""
    assert read_losses(output) == pytest.approx(read_losses(reference), rel=loss_rtol)
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (output, reference))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=atol)
