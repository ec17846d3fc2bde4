"""A drafter directory on disk: its configuration, what its tensors are, and their values when asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3_kimi.errors import DataError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What a drafter's floating-point tensors may be."""

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I64": "int64",
                       "I32": "int32", "BOOL": "bool"}  # fmt: skip


@dataclass(frozen=True)
class TensorFacts:
    """What the header of a file says of one tensor; None where it is not known."""

    shape: tuple[int, ...] | None
    dtype: str | None
    """`float32`, `int64`, ...; for the exotic ones the spelling of safetensors."""


@dataclass(frozen=True)
class DrafterFolder:
    """A folder with `config.json` and safetensors, whoever wrote it."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json` as it is.

        Raises:
            UsageError: there is none.
            DataError: it is no JSON object.
        """
        file = self.path / "config.json"
        if not file.is_file():
            raise UsageError(f"{self.path} holds no drafter: it has no config.json")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise DataError(f"{file} holds a {type(config).__name__}, expected an object")
        return config

    @cached_property
    def tensors(self) -> dict[str, TensorFacts]:
        """Every tensor by its name in the files."""
        facts = {}
        for file in self._files:
            with self._open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    tensor = handle.get_slice(name)
                    dtype = tensor.get_dtype()
                    facts[name] = TensorFacts(tuple(tensor.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype))
        return facts

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, one at a time."""
        for file in self._files:
            with self._open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    yield name, handle.get_tensor(name)

    @cached_property
    def _files(self) -> list[Path]:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            pickled = [file.name for file in sorted(self.path.glob("*.bin"))]
            why = f"; {', '.join(pickled)} may run code when read and is left alone" if pickled else ""
            raise DataError(f"{self.path} has no *.safetensors{why}: save the weights as safetensors")
        return files

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise DataError(f"{file} is damaged: {error}") from error
