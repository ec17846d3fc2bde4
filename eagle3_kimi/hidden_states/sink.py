"""Where captured hidden states arrive: a queue that the connector fills, in this process or through a channel.

Kept apart from the connector so that nothing here imports vLLM.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eagle3_kimi.errors import EngineError

CAPTURE_KEY = "capture_hidden_states"
"""Key in a request's `kv_transfer_params`; its value names the capture (the sample's id)."""

DROP_CUT_KEY = "drop_cut_hidden_states"
"""Key beside it: the states of an answer that was cut at its longest are not wanted."""

CHANNEL_PREFIX = "channel:"
"""Starts the name of a sink in another process."""

_SINKS: dict[str, CaptureSink] = {}
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class CapturedStates:
    """States of one request. L captured layers, low to high; H the target's hidden size."""

    id: str
    token_ids: Tensor
    """int64 [S-1]: every token of the request except the last one, which was never an input."""
    hidden_states: Tensor | None
    """[S-1, L, H] on the CPU; on any tensor-parallel rank but the first only the last layer, [S-1, 1, H], or None."""


class Sink(Protocol):
    """Where the connector puts states."""

    def put(self, states: CapturedStates) -> None:
        """Takes the states of one request, once they are on the CPU."""
        ...


@dataclass(eq=False)
class CaptureSink:
    """A queue of captured states. `name` goes to the connector through vLLM's configuration."""

    name: str = field(default_factory=lambda: f"sink-{next(_NUMBERS)}")
    _arrived: deque[CapturedStates] = field(default_factory=deque)

    def open(self) -> CaptureSink:
        """Makes the sink known to the connector of this process."""
        _SINKS[self.name] = self
        return self

    def close(self) -> None:
        """Forgets the sink."""
        _SINKS.pop(self.name, None)

    def put(self, states: CapturedStates) -> None:
        """Called by the connector when a request's states are on the CPU."""
        self._arrived.append(states)

    def take(self) -> list[CapturedStates]:
        """All that has arrived since the last call."""
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived


def find_sink(name: str, *, sends: bool) -> Sink:
    """The open sink of that name.

    Args:
        name: of the sink.
        sends: this process has states to put; a channel has one sender.

    Raises:
        EngineError: it lives in another process, and is no channel: the engine's worker must run in the one that reads.
    """
    if name.startswith(CHANNEL_PREFIX):
        from eagle3_kimi.hidden_states.state_channel import StateSender

        return StateSender(name) if sends else _Nowhere()
    if name not in _SINKS:
        raise EngineError(
            f"the hidden-states sink {name} is not in this process; vLLM's worker must run inside it: "
            "set VLLM_ENABLE_V1_MULTIPROCESSING=0 and launch the tensor-parallel ranks with accelerate"
        )
    return _SINKS[name]


class _Nowhere:
    """For the ranks without states."""

    def put(self, states: CapturedStates) -> None:
        """Drops them."""


def pinned_like(states: Tensor) -> Tensor:
    """An empty page-locked CPU tensor of the same shape and dtype, for an asynchronous copy."""
    return torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
