"""On a CPU the ranks of a vLLM replica exchange tensors in shared memory, which a killed run leaves behind.

vLLM 0.32 names it after the address at which the ranks meet. Launched processes meet at `env://`, whoever launched
them: two runs on one machine would share their memory, and after a killed one no other could start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def name_shared_memory(launch_id: str) -> None:
    """Names it after `launch_id`, which all processes of this run share and no other run; before the engine starts."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def make_group_name(communicator: CpuCommunicator) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        return f"eagle3-kimi-{launch_id}-{communicator.unique_name}-[{ranks}]"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
