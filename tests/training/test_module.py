"""Invariants of the training module: packing changes nothing, empty batches are harmless, a batch can be learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_kimi.drafter.vocab import build_vocab_map
from eagle3_kimi.hidden_states.store import FeatureSample
from eagle3_kimi.training.batches import PackedBatch, pack
from eagle3_kimi.training.config import TrainConfig
from eagle3_kimi.training.metrics import Counts
from eagle3_kimi.training.setup import build_training_module
from eagle3_kimi.training.ttt import TrainingTimeTest
from tests.training.toy import AUX, HIDDEN, VOCAB, ToyTarget

STEPS = 3


@pytest.fixture
def module(tmp_path: Path) -> TrainingTimeTest:
    config = TrainConfig(store=tmp_path, target="", output=tmp_path, ttt_steps=STEPS, head_dim=8)
    counts = torch.tensor([1] * 16 + [0] * (VOCAB - 16))  # four of the twenty ids that occur are left out
    vocab_map = build_vocab_map(counts, draft_vocab_size=16)
    return build_training_module(config, ToyTarget().save(tmp_path / "target"), vocab_map, AUX)


def build_batch(samples: list[FeatureSample]) -> PackedBatch:
    return pack(samples, STEPS, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN)


def compute(module: TrainingTimeTest, batches: list[PackedBatch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Summed counts and gradients over batches."""
    module.zero_grad()
    totals = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss, counts = module(batch)
        loss.backward()
        totals = totals + counts
    return totals, [parameter.grad.clone() for parameter in module.parameters()]


def test_packed_equals_one_by_one(module: TrainingTimeTest) -> None:
    samples = [ToyTarget().sample(i, prompt=2 + i, output=12 - 2 * i) for i in range(5)]
    packed, packed_grads = compute(module, [build_batch(samples)])
    single, single_grads = compute(module, [build_batch([sample]) for sample in samples])

    torch.testing.assert_close(packed, single)
    for ours, theirs in zip(packed_grads, single_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_targets_outside_the_draft_vocabulary_are_masked_and_missed(module: TrainingTimeTest) -> None:
    sample = ToyTarget().sample(3, prompt=4, output=16)
    inside = sample.target_argmax < 16
    assert 0 < int(inside.sum()) < len(inside)

    counts = Counts.unpack(module(build_batch([sample]))[1])
    assert counts.supervised_tokens == int(inside.sum())
    assert counts.chains[0] == len(inside)  # a miss counts as a chain
    assert counts.hits[0] <= int(inside.sum())


def test_an_empty_batch_gives_zero_loss_and_zero_gradients(module: TrainingTimeTest) -> None:
    totals, grads = compute(module, [build_batch([])])
    assert float(totals.abs().sum()) == 0.0
    assert all(float(grad.abs().sum()) == 0.0 for grad in grads)


def test_overfits_one_batch(module: TrainingTimeTest) -> None:
    """Targets are masked by the target's own argmax: the loss falls to the entropy of its distribution, chains hold."""
    samples = [ToyTarget().sample(i, prompt=3, output=14) for i in range(4)]
    for index, sample in enumerate(samples):
        keep = sample.target_argmax < 16
        assert keep.any(), index
    batch = build_batch(samples)
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        loss, vector = module(batch)
        (loss / vector[1]).backward()
        optimizer.step()

    valid = batch.target_argmax < 16
    joint = [valid]  # the most that chains through the draft vocabulary can reach
    for step in range(1, STEPS):
        kept = batch.rows.kept(step, of=step - 1)
        joint.append(joint[-1][kept] & valid[batch.rows.targets(step)])
    assert Counts.unpack(vector).hits == tuple(float(alive.sum()) for alive in joint)
