"""Extracts the target's hidden states of a data set into a feature store.

Two CPU processes as one tensor-parallel replica, the tiny target:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml train/extract_hidden_states.py \
        --dataset runs/demo/dataset --target tiny --aux_layer_ids '[1, 2, 3]' --tensor_parallel_size 2 \
        --output runs/demo/features

Eight GPUs, Kimi-K2.5:

    accelerate launch --config_file accelerate_configs/8gpu.yaml train/extract_hidden_states.py \
        --dataset /data/samples --target moonshotai/Kimi-K2.5 --trust_remote_code true --tensor_parallel_size 8 \
        --output /data/features
"""

from __future__ import annotations

import logging
import sys

from jsonargparse import ArgumentParser, set_parsing_settings

from eagle3_kimi.errors import Eagle3KimiError
from eagle3_kimi.hidden_states.extract import ExtractConfig, extract_hidden_states


def main(args: list[str] | None = None) -> None:
    """Parses `--config FILE` and flags, extracts, prints nothing but the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # --help shows the fields' docstrings
    parser = ArgumentParser(description="Extracts hidden states into a feature store; flags win over the file.")
    parser.add_argument("--config", action="config", help="YAML file of the options below")
    parser.add_class_arguments(ExtractConfig)
    options = parser.parse_args(args)
    options.pop("config")
    try:
        extract_hidden_states(ExtractConfig(**options.as_dict()))
    except Eagle3KimiError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
