"""Trains an EAGLE-3 drafter on a feature store and exports it for vLLM and SGLang.

Two CPU processes, the tiny target:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml train/train_drafter.py \
        --config train/configs/tiny.yaml --expected_world_size 2 --store runs/demo/features --output runs/demo/drafter

Eight GPUs, Kimi-K2.5:

    accelerate launch --config_file accelerate_configs/8gpu.yaml train/train_drafter.py \
        --config train/configs/kimi_k25.yaml --expected_world_size 8 --store /data/features --output /data/drafter
"""

from __future__ import annotations

import logging
import sys

from jsonargparse import ArgumentParser

from eagle3_kimi.errors import Eagle3KimiError
from eagle3_kimi.training.config import TrainConfig
from eagle3_kimi.training.trainer import train_drafter


def main(args: list[str] | None = None) -> None:
    """Parses `--config FILE` and flags, trains, prints nothing but the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    parser = ArgumentParser(description="Trains an EAGLE-3 drafter; flags win over the file.")
    parser.add_argument("--config", action="config", help="YAML file of the options below")
    parser.add_class_arguments(TrainConfig)
    options = parser.parse_args(args)
    options.pop("config")
    try:
        train_drafter(TrainConfig(**options.as_dict()))
    except Eagle3KimiError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
