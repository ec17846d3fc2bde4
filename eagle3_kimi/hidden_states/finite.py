"""Whether states are numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """No value is NaN or infinite.

    Their sum tells at an eighth of the cost of looking at each one, unless it overflows.
    """
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())
