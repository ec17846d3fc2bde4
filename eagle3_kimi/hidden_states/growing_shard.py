"""A shard that is written while it fills: what waits in memory, and what a crash can cost, stays small.

    8 bytes   length of the header
    header    JSON: dtype, shape and place of every tensor, and the samples' index entries
    spaces    as many as the room kept for the header has left
    tensors   as they came

A safetensors header stands in front and names all tensors, so room is kept for it and it is written last; the format
allows it to end in spaces.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.quantize import CODE_DTYPE

_DTYPES = {
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    CODE_DTYPE: "F8_E4M3",
}
"""What a sample's tensors are, as safetensors calls it."""

_ENTRIES = "samples"
"""Key in the header's metadata."""

_TENSOR_BYTES = 128
"""Of the header for one tensor, beside its name: more than dtype, shape and place ever take."""

_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class ShardSample:
    """What a shard keeps of a sample."""

    entry: dict[str, Any]
    """Its index entry."""
    tensors: dict[str, Tensor]
    """By their names in the shard."""
    header_bytes: int
    """Bytes of the header that it may take, at most."""
    bytes: int
    """Of its tensors and of those in the header."""

    @classmethod
    def of(cls, sample: FeatureSample) -> ShardSample:
        """What to keep of `sample`."""
        entry = sample.index_entry()
        tensors = {f"{sample.id}/{name}": tensor for name, tensor in sample.to_tensors().items()}
        named = sum(map(len, tensors)) + (len(tensors) + 1) * _TENSOR_BYTES  # one more: padding
        header_bytes = named + len(json.dumps(json.dumps(entry)))
        size = header_bytes + sum(tensor.nbytes for tensor in tensors.values())
        return cls(entry=entry, tensors=tensors, header_bytes=header_bytes, bytes=size)


class GrowingShard:
    """One shard on its way; nobody sees it before `finish`.

    Args:
        file: its name once it is finished.
        header_bytes: room for the header: those of all samples that will come, or more.
    """

    def __init__(self, file: Path, *, header_bytes: int) -> None:
        self.file, self.header_bytes = file, -(-header_bytes // _ALIGNMENT) * _ALIGNMENT
        self.entries: list[dict[str, Any]] = []
        """The samples' index entries."""
        self._temporary = file.with_name(f".{file.name}.tmp")
        self._handle: io.FileIO | None = None
        self._tensors: dict[str, dict[str, Any]] = {}
        self._size = 0

    def append(self, samples: Sequence[ShardSample]) -> None:
        """Writes samples, and waits until the disk has them.

        Raises:
            OSError: it has no room.
        """
        tensors = {name: tensor for sample in samples for name, tensor in sample.tensors.items()}
        if surplus := sum(tensor.nbytes for tensor in tensors.values()) % _ALIGNMENT:
            tensors[f"padding/{self._size}"] = torch.zeros(_ALIGNMENT - surplus, dtype=torch.uint8)
        if self._handle is None:
            self._handle = self._temporary.open("wb", buffering=0)
            self._handle.seek(8 + self.header_bytes)
        # the widest dtype first, so that each starts at a multiple of its width
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].itemsize, reverse=True):
            place = [self._size, self._size + tensor.nbytes]
            shape = list(tensor.shape)
            self._tensors[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": place}
            self._write(self._handle, tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            self._size = place[1]
        os.fdatasync(self._handle.fileno())
        self.entries += [sample.entry for sample in samples]

    def finish(self) -> None:
        """Writes the header and gives the shard its name.

        Raises:
            OSError: the disk has no room.
        """
        assert self._handle is not None  # something was appended
        metadata = {_ENTRIES: json.dumps(self.entries)}
        header = json.dumps({"__metadata__": metadata, **self._tensors}, separators=(",", ":")).encode()
        if len(header) > self.header_bytes:
            raise ValueError(f"{self.file}: the header has {len(header)} bytes, room was kept for {self.header_bytes}")
        self._handle.seek(0)
        self._write(self._handle, self.header_bytes.to_bytes(8, "little") + header.ljust(self.header_bytes))
        os.fsync(self._handle.fileno())
        self._handle.close()
        os.replace(self._temporary, self.file)

    def discard(self) -> None:
        """Leaves nothing of an unfinished shard."""
        if self._handle is not None:
            self._handle.close()
        self._temporary.unlink(missing_ok=True)

    @staticmethod
    def _write(handle: io.FileIO, content: bytes | memoryview) -> None:
        view = memoryview(content)
        while view:  # a disk that is nearly full takes a part
            view = view[handle.write(view) :]


def read_entries(shard: Path) -> list[dict[str, Any]] | None:
    """Index entries of a shard's samples from its own header; None where it has none or cannot be read."""
    try:
        with safe_open(shard, framework="pt") as handle:
            metadata = handle.metadata() or {}
    except (SafetensorError, OSError):
        return None
    return json.loads(metadata[_ENTRIES]) if _ENTRIES in metadata else None
