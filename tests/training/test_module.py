"""Invariants of the training module: packing changes nothing, empty batches are harmless, a batch can be learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3_kimi.hidden_states.store import FeatureSample
from eagle3_kimi.training.batches import PackedBatch, pack
from eagle3_kimi.training.metrics import Counts
from eagle3_kimi.training.ttt import TrainingTimeTest
from tests.drafter.test_unroll import naive_unroll
from tests.training.toy import AUX, HIDDEN, ToyTarget, build_toy_module

STEPS = 3


@pytest.fixture
def module() -> TrainingTimeTest:
    return build_toy_module(ttt_steps=STEPS, draft_vocab_size=16)  # four of the twenty ids that occur are left out


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


def test_packed_equals_padded(module: TrainingTimeTest) -> None:
    """The plain way: every sample padded to the longest, dense masks, all rows, full logits, the loss mask at the end."""
    samples = [ToyTarget().sample(i, prompt=2 + i, output=12 - 2 * i) for i in range(5)]
    packed, packed_grads = compute(module, [build_batch(samples)])

    model, toy = module.draft_model, ToyTarget()
    longest = max(len(sample.token_ids) for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        length, prompt = len(sample.token_ids), sample.num_prompt_tokens
        tokens = torch.nn.functional.pad(sample.token_ids, (0, longest - length), value=7)
        aux = torch.nn.functional.pad(sample.aux_hidden_states, (0, 0, 0, longest - length), value=3.0)[:-1]
        final = torch.zeros(longest - 1, HIDDEN)
        final[prompt : length - 1] = sample.final_hidden_states
        normed = torch.nn.functional.rms_norm(final, (HIDDEN,), toy.final_norm, 1e-5)
        p = (normed @ module.target_head.T).softmax(-1)
        for step, states in enumerate(naive_unroll(model, tokens, prompt, aux, STEPS)):  # rows prompt - 1 ...
            for row, state in enumerate(states, start=prompt - 1):
                target = row + 1 + step
                supervised = row + 2 + step <= length - 1 and int(sample.target_argmax[target - prompt]) < 16
                if supervised:
                    log_q = model.lm_head(state).log_softmax(-1)
                    loss = loss - module.step_weights[step] * (p[target] * log_q).sum()
    torch.testing.assert_close(packed[0].float(), loss.detach())
    for ours, theirs in zip(packed_grads, torch.autograd.grad(loss, list(module.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_states_stored_after_the_norm_are_not_normed_again(module: TrainingTimeTest) -> None:
    """Exactly one norm before the head, wherever the store's producer stands."""
    sample, toy = ToyTarget().sample(1, prompt=3, output=9), ToyTarget()
    normed = torch.nn.functional.rms_norm(sample.final_hidden_states, (HIDDEN,), toy.final_norm, 1e-5)
    expected, _ = module(build_batch([sample]))
    module.final_norm = None
    came, _ = module(build_batch([replace(sample, final_hidden_states=normed)]))
    torch.testing.assert_close(came, expected)


def test_targets_outside_the_draft_vocabulary_are_masked_and_missed(module: TrainingTimeTest) -> None:
    sample = ToyTarget().sample(3, prompt=4, output=16)
    inside = sample.target_argmax < 16
    assert 0 < int(inside.sum()) < len(inside)

    counts = Counts.unpack(module(build_batch([sample]))[1])
    assert counts.supervised_tokens == int(inside.sum())
    assert counts.total.chains[0] == len(inside)  # a miss counts as a chain
    assert counts.total.hits[0] <= counts.total.reachable[0] == int(inside.sum())


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
    reached = tuple(float(alive.sum()) for alive in joint)
    assert Counts.unpack(vector).total.hits == Counts.unpack(vector).total.reachable == reached
