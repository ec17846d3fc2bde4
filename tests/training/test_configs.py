"""Every file that is shipped can be read, and says what its name says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.launched import run_launched
from eagle3_kimi.training.config import TrainConfig
from tests.drafter.test_export import KIMI_TEXT_CONFIG
from tests.training.launching import ROOT

TOPOLOGIES = {  # machines, processes, strategy, precision, CPU
    "1gpu": (1, 1, DistributedType.NO, "bf16", False),
    "2nodes_8gpu": (2, 16, DistributedType.MULTI_GPU, "bf16", False),
    "8gpu": (1, 8, DistributedType.MULTI_GPU, "bf16", False),
    "8gpu_fsdp2": (1, 8, DistributedType.FSDP, "bf16", False),
    "cpu_1": (1, 1, DistributedType.NO, "no", True),
    "cpu_2": (1, 2, DistributedType.MULTI_GPU, "no", True),
}
RUNS = {"kimi_k25", "kimi_k25_full_vocab", "smollm2", "tiny"}


def test_each_topology_has_its_file() -> None:
    assert {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")} == set(TOPOLOGIES)
    listed = (ROOT / "accelerate_configs" / "README.md").read_text()
    assert all(f"{name}.yaml" in listed for name in TOPOLOGIES)


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_launch_files_say_what_they_are_named_after(name: str) -> None:
    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    came = (config.num_machines, config.num_processes, config.distributed_type, config.mixed_precision, config.use_cpu)
    assert came == TOPOLOGIES[name]
    if name.endswith("fsdp2"):
        assert config.fsdp_config["fsdp_version"] == 2


def read_run(name: str) -> TrainConfig:
    read: list[TrainConfig] = []
    file = ROOT / "train" / "configs" / f"{name}.yaml"
    arguments = ["--config", str(file), "--store", "store", "--output", "out"]
    if "target:" not in file.read_text():
        arguments += ["--target", "a-folder"]
    run_launched(TrainConfig, read.append, "", arguments)
    return read[0]


@pytest.mark.parametrize("name", sorted(RUNS))
def test_run_files_are_read_without_a_default_guessed(name: str) -> None:
    assert {file.stem for file in (ROOT / "train" / "configs").glob("*.yaml")} == RUNS
    config = read_run(name)
    assert (config.store, config.output) == (Path("store"), Path("out"))
    assert isinstance(config.learning_rate, float)
    assert config.max_length <= config.micro_batch_tokens <= config.batch_tokens


@pytest.mark.parametrize(("name", "draft_vocab_size"), [("kimi_k25", 32000), ("kimi_k25_full_vocab", 163840)])
def test_kimi_drafters_have_the_layout_of_their_target(name: str, draft_vocab_size: int) -> None:
    run = read_run(name)
    drafter = DrafterConfig.for_target(
        KIMI_TEXT_CONFIG,
        draft_vocab_size=run.draft_vocab_size or KIMI_TEXT_CONFIG["vocab_size"],
        num_attention_heads=run.num_attention_heads,
        num_key_value_heads=run.num_key_value_heads,
        head_dim=run.head_dim,
        intermediate_size=run.intermediate_size,
    )
    assert (drafter.draft_vocab_size, drafter.aux_layer_ids) == (draft_vocab_size, (2, 30, 58))
    assert (run.precision, run.max_length) == ("bf16", 32768)


@pytest.mark.parametrize("flag", [["--learning-rate", "fast"], ["--batch-tokens", "1.5"], ["--lerning-rate", "1"]])
def test_a_wrong_flag_is_wrong_usage(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    required: list[Any] = ["--store", "s", "--output", "o", "--target", "t"]
    with pytest.raises(SystemExit) as stopped:
        run_launched(TrainConfig, lambda config: None, "", [*required, *flag])
    assert stopped.value.code == 2
    assert flag[0].strip("-").replace("-", "_") in capsys.readouterr().err
