"""The Accelerator of a run: what was asked for, or a sentence instead of a silent fall-back."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from eagle3_kimi.errors import UsageError


def build_accelerator(*, expected_world_size: int, precision: str) -> Accelerator:
    """Joins the group that `accelerate launch` started and checks that it is the one that was asked for.

    Raises:
        UsageError: another number of processes, or another precision in the launch file.
    """
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)  # buffers are constants: the embedding, the maps
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[ddp])
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
    return accelerator
