"""One block size for an MLA target and a Llama-style drafter on a CPU. Importing this module registers it with vLLM.

In float32 vLLM's CPU MLA kernel takes blocks of 16 tokens only. Its plain attention declares multiples of 32, so the
two share no size and vLLM refuses to start, although it has a kernel for 16 (`vec16`), which it picks by itself.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


@register_backend(AttentionBackendEnum.CPU_ATTN)
class SmallBlockCPUAttention(CPUAttentionBackend):
    """vLLM's CPU attention, with the small blocks that it can read."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Multiples of 16 tokens."""
        return [MultipleOf(16)]
