"""The anchor of the layer numbering: what came as boundary 1 against the embedding sent through layer 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from eagle3_kimi.errors import TargetError
from eagle3_kimi.hidden_states.first_layers import FirstLayers, embed
from eagle3_kimi.target import Target

ANCHOR_LAYER_ID = 1
ANCHOR_TOKENS = 64
"""Causal: a prefix of the sample gives the same states, and is cheap even without an accelerator."""
TOLERANCE = {"float32": 2e-3, "bfloat16": 4e-2}
"""Median relative error of a row that rounding explains; the next layer or the next token is off by about 1."""


class LayerAnchor:
    """Recomputes the first boundaries; layer 0 is read once.

    Args:
        target: where embedding and layers are read from.
        dtype: `float32` or `bfloat16`, of the captured states.
        tensor_parallel_size: of the engine; above 1, a share that was never summed up is looked for.
    """

    def __init__(self, target: Target, *, dtype: str, tensor_parallel_size: int = 1) -> None:
        self._target, self._tolerance, self._processes = target, TOLERANCE[dtype], tensor_parallel_size
        self._first = FirstLayers(target, ANCHOR_LAYER_ID)

    def check(self, token_ids: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[float, str]:
        """Median relative error of what came as boundary 1, and the mistake that explains it (empty: none).

        Args:
            token_ids: int64 [S] a sample.
            states: [S-1, H] a sample.
        """
        tokens = [ids[:-1][:ANCHOR_TOKENS] for ids in token_ids]
        came = [rows[:ANCHOR_TOKENS].float() for rows in states]
        expected = [self._first.forward(ids) for ids in tokens]
        error = _relative_error(came, expected)
        if error <= self._tolerance:
            return error, ""
        for fault, recompute in self._known_faults(tokens, came, expected):
            try:
                fits = _relative_error(*recompute()) <= self._tolerance
            except TargetError:  # quantised experts: that boundary cannot be recomputed
                fits = False
            if fits:
                return error, fault
        return error, (
            "what came as boundary 1 is neither the embedding nor the output of layer 0 or 1: the engine ran other "
            "weights (a wrong revision), or aux layer ids are off by more than one"
        )

    def _known_faults(
        self, tokens: list[Tensor], came: list[Tensor], expected: list[Tensor]
    ) -> Iterator[tuple[str, Callable[[], tuple[list[Tensor], list[Tensor]]]]]:
        """A fault and the pair of states that are equal if it is the one."""
        yield (
            "aux layer ids are one too low: what came as boundary 1 is the embedding, boundary 0",
            lambda: (came, [embed(self._target, ids) for ids in tokens]),
        )
        yield (
            "the states are shifted by one token: row t holds the state of token t + 1",
            lambda: ([rows[:-1] for rows in came], [rows[1:] for rows in expected]),
        )
        yield (
            "the states are shifted by one token: row t holds the state of token t - 1",
            lambda: ([rows[1:] for rows in came], [rows[:-1] for rows in expected]),
        )
        for projections in (("mlp",), ("attention", "mlp"), ("attention",)) if self._processes > 1 else ():
            yield (
                f"the tensor-parallel shards were not reduced: what came as boundary 1 holds one process's part of "
                f"layer 0's {' and '.join(projections)}",
                partial(self._recompute_part, tokens, came, projections),
            )
        yield (
            "aux layer ids are one too high: what came as boundary 1 is the output of layer 1, boundary 2",
            lambda: (came, [FirstLayers(self._target, 2).forward(ids) for ids in tokens]),
        )

    def _recompute_part(
        self, tokens: list[Tensor], came: list[Tensor], projections: tuple[str, ...]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Boundary 1 as the first tensor-parallel process, which writes, has it before the sum."""
        layers = FirstLayers(self._target, ANCHOR_LAYER_ID)
        layers.keep_part(projections, self._processes)
        return came, [layers.forward(ids) for ids in tokens]


def _relative_error(came: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Median over rows of |came - expected| / |expected|."""
    rows = [(c - e).norm(dim=-1) / e.norm(dim=-1).clamp_min(1e-12) for c, e in zip(came, expected, strict=True)]
    errors = torch.cat(rows).nan_to_num(nan=math.inf)
    return float(errors.median()) if len(errors) else math.inf
