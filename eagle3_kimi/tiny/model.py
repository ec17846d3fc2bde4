"""Kimi's text architecture (DeepSeek-V3: MLA + MoE, YaRN rope) at toy size.

Sizes that cannot be chosen freely: the CPU MLA kernel of vLLM takes only Kimi's `kv_lora_rank` 512
and rope size 64; with plain rope instead of YaRN its CPU rotary kernel rotates wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import DeepseekV3Config

AUX_LAYER_IDS = (1, 2, 3)
"""`(2, n // 2, n - 3)` repeats ids on four layers, so they are named."""

MAX_POSITION_EMBEDDINGS = 262144

ROPE_PARAMETERS: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


_ROUTING: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Read by vLLM from the configuration; transformers routes like this without being told."""


def build_config(vocab_size: int, *, eos_token_id: int, pad_token_id: int) -> DeepseekV3Config:
    """The tiny target's configuration."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        **_ROUTING,
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rope_parameters=dict(ROPE_PARAMETERS),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        initializer_range=0.08,  # attention that copies forms late from the usual 0.02 at this width
        dtype="float32",
    )
