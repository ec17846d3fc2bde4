"""The target's head shared out among the ranks of a tensor-parallel group.

The final states are the same on every rank, so each finds the best of its share of the vocabulary, and only those go to
the leader. Alone it would hold up the others: for Kimi-K2.5 the head is 4% of a forward pass's arithmetic, and so 29%
of what each of eight ranks has of it.

    rank 0   tokens 0..V/2-1   best k ──┐
    rank 1   tokens V/2..V-1   best k ──┴──► leader: the best k of all
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_kimi.hidden_states.encode import Captured, Encoded, open_stream, supervised_states
from eagle3_kimi.hidden_states.formats import FeatureFormat
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.topk import BestTokens, TopTargets
from eagle3_kimi.target import Target


class SharedHead:
    """One rank's share, and on the leader the whole. All ranks of the group call it with the same states.

    Args:
        target: the target model.
        vocab_size: V.
        dtype: of the weights and the product.
        ranks: this process's place.
    """

    def __init__(self, target: Target, vocab_size: int, *, dtype: torch.dtype, ranks: Ranks) -> None:
        size, place = ranks.tensor_parallel_size, ranks.rank % ranks.tensor_parallel_size
        tokens = range(vocab_size * place // size, vocab_size * (place + 1) // size)
        self._head = TargetHead(target, dtype=dtype, device=ranks.device, tokens=tokens)
        self._ranks, self._vocab_size = ranks, vocab_size
        _ = ranks.host_group  # made here, by all ranks, and not in a thread

    @property
    def device(self) -> torch.device:
        """Where this rank's share lives."""
        return self._head.device

    def find_top(self, states: Tensor, k: int) -> TopTargets:
        """[N, H] -> the k most likely tokens after each (V if there are fewer), on the CPU. The leader's."""
        parts = self.help(states, k)
        assert parts is not None  # the others only help
        return BestTokens.merge(parts, min(k, self._vocab_size)).among_all()

    def argmax(self, states: Tensor) -> Tensor:
        """[N, H] -> int64 [N], on the CPU. The leader's."""
        return self.find_top(states, 1).choice.to(torch.int64)

    def help(self, states: Tensor, k: int) -> list[BestTokens] | None:
        """Every rank's best tokens, on the leader; what the other ranks call when it asks for anything."""
        k = min(k, self._vocab_size)
        best = self._head.find_best(states, k)
        packed = torch.cat([best.ids.view(torch.float32), best.logits, best.total[:, None]], dim=1)
        parts = self._ranks.gather_in_group(packed)
        return None if parts is None else [_unpack(part, k) for part in parts]


class HelpingEncoder:
    """What the other ranks do while the leader's `FeatureEncoder` encodes: their share of the head.

    Args:
        head: the group's.
        store_format: of what the leader makes.
    """

    def __init__(self, head: SharedHead, store_format: FeatureFormat) -> None:
        self._head, self._stream = head, open_stream(head.device)
        self._top_k = store_format.top_k if store_format.targets == "topk" else 1

    def encode(self, captured: Sequence[Captured]) -> list[Encoded]:
        """Of the samples that the leader encodes at the same time. Makes nothing."""
        with torch.cuda.stream(self._stream):
            states = torch.cat([supervised_states(*one) for one in captured])
            self._head.help(states.to(self._head.device), self._top_k)
        return []


def _unpack(packed: Tensor, k: int) -> BestTokens:
    ids, logits, total = packed.split([k, k, 1], dim=1)
    return BestTokens(ids=ids.contiguous().view(torch.int32), logits=logits, total=total[:, 0])
