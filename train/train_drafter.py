"""Trains an EAGLE-3 drafter on a feature store and exports it for vLLM and SGLang.

Two CPU processes, the tiny target:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml train/train_drafter.py \
        --config train/configs/tiny.yaml --expected-world-size 2 --store runs/demo/features --output runs/demo/drafter

Eight GPUs, Kimi-K2.5:

    accelerate launch --config_file accelerate_configs/8gpu.yaml train/train_drafter.py \
        --config train/configs/kimi_k25.yaml --expected-world-size 8 --store /data/features --output /data/drafter

Without a store, on 500 GB of disk: parts are extracted, trained on and deleted, on the same GPUs (`--online` instead of
`--max-disk 500GB`: nothing is written, where target and drafter fit on the GPUs together):

    accelerate launch --config_file accelerate_configs/8gpu.yaml train/train_drafter.py \
        --config train/configs/kimi_k25.yaml --expected-world-size 8 --dataset /data/samples --max-disk 500GB \
        --tensor-parallel-size 8 --trust-remote-code true --output /data/drafter

`--push-to REPO --tag V` pushes the exported drafter to the Hub from the main process, after the checks.
"""

from __future__ import annotations

from eagle3_kimi.hub.after_run import PushOptions, train_and_push
from eagle3_kimi.launched import run_launched
from eagle3_kimi.training.config import LiveOptions, TrainConfig

if __name__ == "__main__":
    run_launched(
        (TrainConfig, LiveOptions, PushOptions),
        train_and_push,
        "Trains an EAGLE-3 drafter on stored hidden states, or makes them on the way; flags win over the file.",
        example="accelerate launch --config_file accelerate_configs/8gpu.yaml train/train_drafter.py --config "
        "train/configs/kimi_k25.yaml --expected-world-size 8 --store features -o drafter",
    )
