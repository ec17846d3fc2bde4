"""The Accelerator of a run: what was asked for, or a sentence instead of a silent fall-back."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, ProjectConfiguration
from torch.distributed.fsdp import MixedPrecisionPolicy

from eagle3_kimi.errors import UsageError

_PROJECT = "eagle3-kimi"


def build_accelerator(
    *, expected_world_size: int, precision: str, tracker: str | None = "none", output: Path | None = None
) -> Accelerator:
    """Joins the group that `accelerate launch` started and checks that it is the one that was asked for.

    Args:
        expected_world_size: processes there must be.
        precision: `fp32` or `bf16`.
        tracker: `tensorboard`, `wandb`, `trackio` or `none`; None takes tensorboard where it is installed.
        output: the run folder; a tracker that writes files writes them to its `logs`.

    Raises:
        UsageError: another number of processes, precision or strategy than asked for, no GPU for a GPU file, or a
            tracker that is not installed.
    """
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)  # buffers are constants: the embedding, the maps
    tracker = choose_tracker(tracker)
    folders = ProjectConfiguration(project_dir=output, logging_dir=None if output is None else str(output / "logs"))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        kwargs_handlers=[ddp],
        fsdp_plugin=build_fsdp_plugin(precision) if _is_asked_for("FSDP") else None,
        log_with=None if tracker == "none" else tracker,
        project_config=folders,
    )
    if accelerator.num_processes != expected_world_size:
        raise UsageError(
            f"expected {expected_world_size} processes, {accelerator.num_processes} are running. On a CPU, Accelerate "
            "starts one process unless the file says distributed_type MULTI_GPU with use_cpu (see "
            "accelerate_configs/cpu_2.yaml); otherwise correct expected_world_size"
        )
    launched = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    if launched != precision:
        raise UsageError(
            f"the launch file's mixed_precision means {launched}, the run asks for {precision}: make them equal"
        )
    _check_strategy(accelerator)
    return accelerator


def build_fsdp_plugin(precision: str) -> FullyShardedDataParallelPlugin:
    """FSDP as the launch file says, with the precision of a DDP run.

    Weights are gathered in bf16, gradients are summed over ranks in float32. Accelerate's own policy would sum them in
    bf16, and return this module's loss and counts in bf16 too.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None, reduce_dtype=torch.float32
    )
    return FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)


def choose_tracker(name: str | None) -> str:
    """The tracker to use.

    Raises:
        UsageError: the one that was named is not installed.
    """
    if name is None:
        return "tensorboard" if importlib.util.find_spec("tensorboard") else "none"
    if name != "none" and not importlib.util.find_spec(name):
        raise UsageError(f"the tracker {name} is not installed: `pip install {name}`, or choose another (none)")
    return name


def start_tracker(accelerator: Accelerator, config: dict[str, object], *, name: str, identity: str, first: int) -> None:
    """Opens the tracker's run; one that goes on from step `first` replaces what was logged after it."""
    plain = {key: value if isinstance(value, (int, float, str)) else str(value) for key, value in config.items()}
    service = {"name": name, "resume": "allow"}
    accelerator.init_trackers(
        _PROJECT,
        config=plain,
        init_kwargs={
            "tensorboard": {"purge_step": first + 1},
            "wandb": {"id": identity[:16], **service},
            "trackio": service,
        },
    )


def _check_strategy(accelerator: Accelerator) -> None:
    """Accelerate runs DDP where it cannot run what the file says, and computes on the CPU where it finds no GPU."""
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if _is_asked_for(name) and (name != "FSDP" or accelerator.distributed_type != DistributedType.FSDP):
            raise UsageError(
                f"the launch file asks for {name}, what runs is {accelerator.distributed_type.value}. This trainer "
                "knows DDP and FSDP2, and Accelerate has FSDP on GPUs only: choose another launch file"
            )
    if _is_asked_for("FSDP") and os.environ.get("FSDP_VERSION") != "2":
        raise UsageError(
            "the launch file asks for FSDP 1: set fsdp_version: 2, as in accelerate_configs/8gpu_fsdp2.yaml"
        )
    if accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16" and not _is_asked_for("CPU"):
        raise UsageError(
            "bf16 was asked for and no GPU is found: this machine would compute on its CPU. Choose one of "
            "accelerate_configs/cpu_*.yaml; accelerate_configs/README.md says how to try a GPU file on CPUs"
        )


def _is_asked_for(name: str) -> bool:
    """Whether `accelerate launch` passed on a strategy."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"
