"""Sampling settings of drafted requests on a CPU. Importing this module mends them in vLLM.

vLLM copies each request's temperature and top_p to its drafted tokens with a kernel whose CPU version (0.32) writes
into a copy of the output, cast to whole numbers, and drops it. The target's logits are then divided by whatever lay in
memory: almost nothing is accepted, and the text is not the target's. Greedy decoding does not pass there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeats each request's value for each of its tokens.

    Args:
        x: [B] values.
        cu_num_tokens: [B], tokens of the requests up to and including each.
        num_tokens: the last of them.
        replace_from: a value to be replaced.
        replace_to: what by.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
