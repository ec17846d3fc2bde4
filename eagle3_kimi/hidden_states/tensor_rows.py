"""Several tensors that have their rows in common, handled as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor


class TensorRows:
    """Base of dataclasses whose fields are all tensors with one row a token."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same fields with `function` applied to each."""
        return type(self)(**{name: function(tensor) for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """On `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def tensors(self) -> dict[str, Tensor]:
        """Field -> tensor."""
        values: Any = self
        return {item.name: getattr(values, item.name) for item in fields(values)}

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one after the other; at least one part."""
        columns = [part.tensors() for part in parts]
        return cls(**{name: torch.cat([column[name] for column in columns]) for name in columns[0]})

    def split(self, lengths: Sequence[int]) -> list[Self]:
        """What `cat` of parts of these lengths was made of."""
        columns = {name: split_rows(tensor, lengths) for name, tensor in self.tensors().items()}
        return [type(self)(**{name: parts[n] for name, parts in columns.items()}) for n in range(len(lengths))]


def split_rows(tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Parts with memory of their own: a view would keep all in memory, and be sent to another process with all."""
    return [part.clone() for part in tensor.split(list(lengths))]
