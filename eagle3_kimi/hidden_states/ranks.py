"""The launched processes as a grid: tensor-parallel groups that share the data.

    world size 4, tensor-parallel size 2:   group 0 = ranks 0, 1    group 1 = ranks 2, 3

The first rank of a group is its leader: the only one that gets all states, and the one that writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.errors import UsageError


@dataclass(frozen=True)
class Ranks:
    """This process's place in the grid."""

    rank: int
    world_size: int
    tensor_parallel_size: int
    device: torch.device

    @classmethod
    def join(cls, tensor_parallel_size: int) -> Ranks:
        """Joins the group `accelerate launch` started; alone without a launcher.

        Raises:
            UsageError: the processes do not divide into groups of `tensor_parallel_size`.
        """
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        if state.num_processes % tensor_parallel_size:
            raise UsageError(
                f"--tensor_parallel_size {tensor_parallel_size} wants a multiple of {tensor_parallel_size} processes, "
                f"{state.num_processes} are running. Start them with accelerate launch and a file of "
                "accelerate_configs/ (on a CPU, Accelerate starts one process unless the file says distributed_type "
                "MULTI_GPU with use_cpu)"
            )
        return cls(state.process_index, state.num_processes, tensor_parallel_size, state.device)

    @property
    def group(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def num_groups(self) -> int:
        return self.world_size // self.tensor_parallel_size

    @property
    def is_leader(self) -> bool:
        return self.rank % self.tensor_parallel_size == 0

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank; also a barrier."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def gather_in_group(self, tensor: Tensor) -> list[Tensor] | None:
        """Every rank's tensor, all of one shape and on the CPU, to the leader of its group; the others get None.

        May run in a thread of its own, if nothing else of the group's does meanwhile.
        """
        parts = [torch.empty_like(tensor) for _ in range(self.tensor_parallel_size)] if self.is_leader else None
        leader = self.group * self.tensor_parallel_size
        torch.distributed.gather(tensor, parts, dst=leader, group=self.host_group)
        return parts

    def scatter_in_group(self, values: list[Any] | None) -> Any:
        """The leader's `values`, one to each rank of its group; the others give None."""
        if self.tensor_parallel_size == 1:
            assert values is not None  # everyone leads itself
            return values[0]
        came: list[Any] = [None]
        leader = self.group * self.tensor_parallel_size
        torch.distributed.scatter_object_list(came, values, src=leader, group=self.host_group)
        return came[0]

    @cached_property
    def host_group(self) -> torch.distributed.ProcessGroup:
        """The group's processes, for what is in the host's memory. Made by all ranks at once, when first asked for."""
        size = self.tensor_parallel_size
        firsts = range(0, self.world_size, size)
        groups = [torch.distributed.new_group(list(range(first, first + size)), backend="gloo") for first in firsts]
        return groups[self.group]
