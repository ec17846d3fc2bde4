"""One of two gloo processes that train the same module sharded by `fully_shard` and whole, and compare.

Run as `python fsdp_worker.py RANK FOLDER`. The strategy is that of accelerate_configs/8gpu_fsdp2.yaml: the root alone is
wrapped, parameters stay gathered between forward and backward.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from eagle3_kimi.training.batches import PackedBatch, pack
from eagle3_kimi.training.channels import ChannelRates
from eagle3_kimi.training.launch import build_fsdp_plugin
from eagle3_kimi.training.step import apply_gradients
from eagle3_kimi.training.ttt import TrainingTimeTest
from tests.training.toy import AUX, HIDDEN, ToyTarget, build_toy_module

WORLD, STEPS = 2, 3
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build_batch(step: int, rank: int, micro: int) -> PackedBatch:
    """Uneven: rank 1 has about three times the supervised tokens of rank 0."""
    number = 100 * step + 10 * rank + micro
    samples = [ToyTarget().sample(number + i, prompt=3, output=5 + 12 * rank + i) for i in range(2)]
    return pack(samples, STEPS, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN)


def build(*, sharded: bool, precision: str = "fp32") -> tuple[TrainingTimeTest, torch.optim.Optimizer]:
    module = build_toy_module(ttt_steps=STEPS, draft_vocab_size=16)
    if sharded:
        policy = build_fsdp_plugin(precision).mixed_precision_policy
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


def take_step(module: TrainingTimeTest, optimizer: torch.optim.Optimizer, step: int, rank: int | None) -> torch.Tensor:
    """One step of two micro-batches a rank; `rank` None takes those of both ranks, as the whole module does."""
    ranks = range(WORLD) if rank is None else [rank]
    batches = [build_batch(step, r, micro) for r in ranks for micro in range(2)]
    supervised = torch.zeros((), dtype=torch.float64)
    for index, batch in enumerate(batches):
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(index == len(batches) - 1)
        loss, counts = module(batch)
        loss.backward()
        supervised += counts[1]
    if rank is not None:
        dist.all_reduce(supervised)
    return apply_gradients(
        list(module.parameters()),
        optimizer,
        supervised_tokens=supervised,
        world_size=1 if rank is None else WORLD,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        channel_rates=ChannelRates(module.draft_model.fc.weight, torch.linspace(0.5, 2.0, len(AUX) * HIDDEN)),
    )


def check_bf16(rank: int) -> None:
    """Weights are gathered in bf16; loss, counts and gradients stay what they are in DDP."""
    module, _ = build(sharded=True, precision="bf16")
    batch = build_batch(0, rank, 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss, counts = module(batch)
    loss.backward()
    assert (loss.dtype, counts.dtype) == (torch.float32, torch.float64)
    assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}
    expected, expected_counts = build(sharded=False)[0](batch)
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    assert torch.equal(counts[1:3], expected_counts[1:3])


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    assert dist.get_world_size() == WORLD
    check_bf16(rank)
    whole, whole_optimizer = build(sharded=False)
    module, optimizer = build(sharded=True)
    for step in range(2):
        # the whole module sums over all batches itself: nothing was averaged
        expected = take_step(whole, whole_optimizer, step, None) if rank == 0 else None
        norm = take_step(module, optimizer, step, rank)
        if expected is not None:
            torch.testing.assert_close(norm, expected)
    state, moments = (
        get_model_state_dict(module, options=FULL),
        get_optimizer_state_dict(module, optimizer, options=FULL),
    )
    if rank == 0:
        assert list(state) == list(whole.state_dict())
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
        save_file(state, folder / "model.safetensors")
        torch.save(moments, folder / "optimizer.bin")
    dist.barrier()

    resumed, resumed_optimizer = build(sharded=True)
    set_model_state_dict(resumed, load_file(folder / "model.safetensors"), options=FULL)
    loaded = torch.load(folder / "optimizer.bin", weights_only=True)
    set_optimizer_state_dict(resumed, resumed_optimizer, loaded, options=FULL)
    for step in (2, 3):
        take_step(module, optimizer, step, rank)
        take_step(resumed, resumed_optimizer, step, rank)
    for ours, theirs in zip(resumed.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
    if rank == 0:
        (folder / "done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
