"""The best tokens of parts of a vocabulary, put together: those of the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.topk import BestTokens, find_best
from eagle3_kimi.target import Target


@pytest.mark.parametrize(("vocab", "k", "num_parts"), [(1000, 64, 2), (1001, 64, 8), (50, 40, 8), (16, 16, 3)])
def test_parts_of_a_vocabulary_give_what_the_whole_gives(vocab: int, k: int, num_parts: int) -> None:
    logits = 5 * torch.randn(37, vocab, generator=torch.Generator().manual_seed(0))
    expected = logits.log_softmax(-1)
    starts = [vocab * part // num_parts for part in range(num_parts + 1)]
    parts = [find_best(logits[:, start:end], k, first_id=start) for start, end in pairwise(starts)]
    top = BestTokens.merge(parts, k).among_all()
    values, ids = expected.topk(k)
    assert torch.equal(top.ids, ids.to(torch.int32))
    torch.testing.assert_close(top.log_probs.float(), values, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(top.tail_mass, (1 - values.exp().sum(-1)).clamp(0, 1), rtol=0, atol=1e-5)


def test_a_part_of_the_head_numbers_its_tokens_as_the_whole_does(random_target: Target) -> None:
    whole = TargetHead(random_target, dtype=torch.float32)
    states = torch.randn(9, random_target.config["hidden_size"], generator=torch.Generator().manual_seed(1))
    vocab, size = whole.logits(states).shape[-1], 3
    tokens = [range(vocab * part // size, vocab * (part + 1) // size) for part in range(size)]
    parts = [TargetHead(random_target, dtype=torch.float32, tokens=part).find_best(states, 20) for part in tokens]
    came, expected = BestTokens.merge(parts, 20).among_all(), whole.find_top(states, 20)
    assert torch.equal(came.ids, expected.ids)
    torch.testing.assert_close(came.log_probs.float(), expected.log_probs.float(), rtol=1e-3, atol=1e-3)
