from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.training.step import FiniteGuard, StepTrace, apply_gradients
from tests.training.launching import ENVIRONMENT


def apply(gradients: list[list[float]], **options: float) -> tuple[list[list[float]], float]:
    """One step of plain gradient descent with rate 1 from zero weights: the weights are minus the applied gradient."""
    parameters = [nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    norm = apply_gradients(
        parameters,
        torch.optim.SGD(parameters, lr=123.0),
        supervised_tokens=torch.tensor(options.get("supervised", 1.0)),
        world_size=int(options.get("world_size", 1)),
        max_grad_norm=options.get("max_grad_norm", 1e9),
        learning_rate=1.0,
    )
    return [(-parameter).tolist() for parameter in parameters], float(norm)


def test_the_mean_over_ranks_becomes_the_sum_divided_by_all_supervised_tokens() -> None:
    # two ranks, averaged: (6 + 2) / 2 = 4 a weight; 4 supervised tokens in all: (6 + 2) / 4 = 2
    applied, norm = apply([[4.0, 0.0], [0.0]], world_size=2, supervised=4.0)
    assert applied == [[2.0, 0.0], [0.0]]
    assert norm == 2.0


def test_the_norm_is_clipped_after_the_division() -> None:
    applied, norm = apply([[3.0], [4.0]], max_grad_norm=1.0)
    assert norm == 5.0
    torch.testing.assert_close(applied, [[0.6], [0.8]], rtol=1e-4, atol=0)


def test_a_step_without_supervised_tokens_changes_nothing() -> None:
    assert apply([[0.0, 0.0]], supervised=0.0) == ([[0.0, 0.0]], 0.0)


def build_trace(step: int, *, losses: dict[tuple[str, ...], float], norm: float = 1.0) -> StepTrace:
    return StepTrace(
        step=step,
        loss_sum=torch.tensor(sum(losses.values())),
        grad_norm=torch.tensor(norm),
        micro_batches=[(ids, torch.tensor(loss)) for ids, loss in losses.items()],
    )


def test_the_guard_names_the_samples_of_the_bad_batch_one_step_later() -> None:
    guard = FiniteGuard()
    guard.add(build_trace(1, losses={("a", "b"): 1.0, ("c",): 2.0}))
    guard.add(build_trace(2, losses={("d",): 1.0, ("e", "f"): float("nan")}))
    with pytest.raises(RunStopped, match=r"step 2: the loss is nan.* packed together: e, f\. Nothing"):
        guard.add(build_trace(3, losses={("g",): float("nan")}))


def test_the_guard_sees_the_last_step_and_a_gradient_alone() -> None:
    guard = FiniteGuard()
    guard.finish()
    guard.add(build_trace(1, losses={("a", "b"): 1.0}, norm=float("inf")))
    with pytest.raises(RunStopped, match=r"step 1: .*norm inf.* whose losses are all finite; its samples: a, b\."):
        guard.finish()
    guard.finish()


@pytest.mark.multiprocess
def test_fully_sharded_equals_whole_and_comes_back_from_its_state(tmp_path: Path) -> None:
    """Two gloo processes, FSDP2's `fully_shard` itself: Accelerate has it on GPUs only."""
    worker = Path(__file__).with_name("fsdp_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(tmp_path)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    assert (tmp_path / "done").exists()
