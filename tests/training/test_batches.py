from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3_kimi.errors import DataError
from eagle3_kimi.training.batches import deal, pack, plan_epoch, select_trainable
from tests.training.toy import AUX, HIDDEN, ToyTarget


class Samples(list):
    @property
    def lengths(self) -> list[int]:
        return [len(sample.token_ids) for sample in self]

    @property
    def prompt_lengths(self) -> list[int]:
        return [sample.num_prompt_tokens for sample in self]


def test_every_sample_once_and_the_order_follows_the_seed() -> None:
    lengths = [5 + 7 * i % 23 for i in range(50)]
    plan = plan_epoch(range(50), lengths, batch_tokens=60, seed=3, epoch=0)

    assert sorted(index for batch in plan for index in batch) == list(range(50))
    assert all(sum(lengths[i] for i in batch) <= 60 for batch in plan)
    assert plan == plan_epoch(reversed(range(50)), lengths, batch_tokens=60, seed=3, epoch=0)
    assert plan != plan_epoch(range(50), lengths, batch_tokens=60, seed=3, epoch=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_dealing_keeps_the_batch_the_budget_and_equal_counts(world_size: int) -> None:
    lengths = [30, 3, 9, 22, 14, 14, 5]
    parts = deal(range(7), lengths, micro_batch_tokens=32, world_size=world_size)

    assert len(parts) % world_size == 0
    assert sorted(index for part in parts for index in part) == list(range(7))
    assert all(sum(lengths[i] for i in part) <= 32 for part in parts)


def test_a_packed_batch_lines_up_tokens_and_targets() -> None:
    toy = ToyTarget()
    first, second = toy.sample(1, prompt=3, output=5), toy.sample(2, prompt=2, output=3)
    batch = pack([first, second], 2, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN)

    assert batch.num_tokens == 13
    assert len(batch.aux_hidden_states) == len(batch.input_ids) == 6 + 3  # S - 2 rows each
    assert batch.input_ids.tolist() == [*first.token_ids[1:7].tolist(), *second.token_ids[1:4].tolist()]
    # Step 0 of a supervised row takes the token that the row's own entry in the chain names.
    assert torch.equal(batch.input_ids[batch.rows.supervised], batch.chain_ids)
    # The toy's final state at a position points at the next token: greedy samples continue with their own argmax.
    assert batch.target_argmax.tolist() == [*first.token_ids[4:].tolist(), *second.token_ids[3:].tolist()]


def test_long_and_empty_samples_are_refused_and_counted() -> None:
    toy = ToyTarget()
    samples = Samples(
        [toy.sample(0, prompt=3, output=2), toy.sample(1, prompt=3, output=1), toy.sample(2, prompt=3, output=9)]
    )

    assert select_trainable(samples, max_length=10) == ([0], {"too_long": 1, "no_supervised_tokens": 1})
    with pytest.raises(DataError, match="none of 3 samples"):
        select_trainable(samples, max_length=2)


def test_bfloat16_states_stay_bfloat16() -> None:
    sample = ToyTarget().sample(0, prompt=3, output=4)
    half = replace(
        sample,
        aux_hidden_states=sample.aux_hidden_states.bfloat16(),
        final_hidden_states=sample.final_hidden_states.bfloat16(),
    )
    batch = pack([half], 2, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN)
    assert batch.aux_hidden_states.dtype == batch.final_hidden_states.dtype == torch.bfloat16
    assert batch.to("cpu").aux_hidden_states.dtype == torch.float32
