from __future__ import annotations

import torch
from vllm.v1.sample import rejection_sampler

from eagle3_kimi.evaluation.cpu_sampling import expand_batch_to_tokens


def test_each_requests_setting_is_that_of_its_tokens() -> None:
    ends = torch.tensor([2, 5, 6], dtype=torch.int32)
    temperatures = torch.tensor([0.6, 0.0, 1.5])
    expanded = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 6, 0, 1)
    assert torch.equal(expanded, torch.tensor([0.6, 0.6, 1.0, 1.0, 1.0, 1.5]))
    assert rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens


def test_a_request_without_drafts_has_no_token() -> None:
    ends = torch.tensor([0, 2], dtype=torch.int32)
    assert expand_batch_to_tokens(torch.tensor([7, 8]), ends, 2).tolist() == [8, 8]
