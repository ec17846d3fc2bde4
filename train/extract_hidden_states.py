"""Extracts the target's hidden states of a data set into a feature store.

Two CPU processes as one tensor-parallel replica, the tiny target:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml train/extract_hidden_states.py \
        --dataset runs/demo/dataset --target tiny --aux-layer-ids '[1, 2, 3]' --tensor-parallel-size 2 \
        --output runs/demo/features

Eight GPUs, Kimi-K2.5:

    accelerate launch --config_file accelerate_configs/8gpu.yaml train/extract_hidden_states.py \
        --dataset /data/samples --target moonshotai/Kimi-K2.5 --trust-remote-code true --tensor-parallel-size 8 \
        --output /data/features

`--push-to REPO --tag V` pushes the store to the Hub from the main process, after the checks.
"""

from __future__ import annotations

from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hub.after_run import PushOptions, extract_and_push
from eagle3_kimi.launched import run_launched

if __name__ == "__main__":
    run_launched(
        (ExtractConfig, PushOptions),
        extract_and_push,
        "Extracts hidden states into a store; flags win over the file.",
        example="accelerate launch --config_file accelerate_configs/8gpu.yaml train/extract_hidden_states.py --dataset "
        "samples --target moonshotai/Kimi-K2.5 --trust-remote-code --tensor-parallel-size 8 -o features",
    )
