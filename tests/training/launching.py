"""Starts the trainer as a person does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def start_launch(launch_file: str, overrides: list[str], options: list[str], **environment: str) -> subprocess.Popen:
    """`accelerate launch --config_file accelerate_configs/LAUNCH_FILE OVERRIDES train/train_drafter.py OPTIONS`."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(ROOT / "accelerate_configs" / launch_file), *overrides),
            *(str(ROOT / "train"), "drafter", *options),
        ],
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(launch_file: str, overrides: list[str], options: list[str], **environment: str) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    process = start_launch(launch_file, overrides, options, **environment)
    printed, _ = process.communicate(timeout=240)
    return process.returncode, printed
