"""The EAGLE-3 draft model (arXiv 2503.01840), Llama-style trunk, and its unrolling.

T packed rows, M supervised rows, A aux layers, H hidden size, V target vocab, D draft vocab, N heads, C head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_kimi.drafter.attention import attend
from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.rope import build_inverse_frequencies, compute_rotation, rotate
from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.drafter.target_mlp import TargetMLP

_MLP_SHARE = 0.3
"""Of the target's MLP in the drafter's at the start: the whole of it learns more slowly (benchmarks/README.md)."""


class Attention(nn.Module):
    """Causal attention whose queries, keys and values see embedding and state side by side (2H)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def queries(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [T, N, C] of x [T, 2H]."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rotation)

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values [T, Nkv, C] of x [T, 2H]."""
        keys = rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rotation)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The one decoder layer.

    e = input_layernorm(embedding)    h = hidden_norm(state)    a = self_attn([e; h])
    r = a + state                     z = mlp(post_attention_layernorm(r)) + r
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def join(self, embedding: Tensor, state: Tensor) -> Tensor:
        """[T, 2H]: what queries, keys and values are made of."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(state)), dim=-1)

    def finish(self, attention: Tensor, state: Tensor) -> Tensor:
        """From the heads' outputs [M, N, C] and the incoming state [M, H] to the outgoing state [M, H]."""
        residual = self.self_attn.o_proj(attention.flatten(1)) + state
        return self.mlp(self.post_attention_layernorm(residual)) + residual


class DraftModel(nn.Module):
    """fc, one layer, norm, head. `state_dict()` holds exactly the tensors of the exported file, under their names.

    The embedding is the target's, frozen, and not part of the state.

        aux [T, A*H] --fc--> state --midlayer (with embed(next token))--> state --norm, lm_head--> draft logits [D]
                                ^_________________________________________|  next step
    """

    embed_tokens: Tensor
    inverse_frequencies: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        frequencies, self.rope_factor = build_inverse_frequencies(config)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self.register_buffer("embed_tokens", torch.zeros(config.vocab_size, config.hidden_size), persistent=False)

    @torch.no_grad()
    def initialise(self, *, embed_tokens: Tensor, lm_head: Tensor, final_norm: Tensor, seed: int) -> None:
        """Seeded start: the target's embedding, head rows [D, H] and final norm; normal weights elsewhere."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
        self.embed_tokens = embed_tokens
        self.lm_head.weight.copy_(lm_head)
        self.norm.weight.copy_(final_norm)

    @torch.no_grad()
    def start_near_target(self, *, aux_size: float, mlp: TargetMLP | None = None) -> None:
        """Changes the random start so that the drafter begins as the target's head on the deepest aux state.

        `fc` passes that state on and leaves the others out, and the attention adds nothing yet: the state is in the
        space that the head reads, and what is left to learn is one token's step ahead. That token's embedding comes in
        through attention alone, so each query adds its own key: a row starts by attending to itself.

        Args:
            aux_size: typical size of a channel of that state; the fused state's becomes 1.
            mlp: of a target layer above that state. The drafter's MLP starts as a share of it, as far as it has
                channels; without one it adds nothing yet.
        """
        self.fc.weight.zero_()
        self.fc.weight[:, -self.config.hidden_size :].fill_diagonal_(1 / aux_size)
        attention, groups = self.midlayer.self_attn, self.config.num_attention_heads // self.config.num_key_value_heads
        keys = attention.k_proj.weight.unflatten(0, (-1, self.config.head_dim))
        attention.q_proj.weight.add_(keys.repeat_interleave(groups, dim=0).flatten(0, 1))
        attention.o_proj.weight.zero_()
        own = self.midlayer.mlp
        own.down_proj.weight.zero_()
        if mlp is not None:
            channels = min(len(mlp.gate), len(own.gate_proj.weight))
            own.gate_proj.weight[:channels] = mlp.gate[:channels]
            own.up_proj.weight[:channels] = mlp.up[:channels]
            own.down_proj.weight[:, :channels] = mlp.down[:, :channels] * (_MLP_SHARE / aux_size)
            self.midlayer.post_attention_layernorm.weight.copy_(mlp.norm)

    @property
    def draft_to_target(self) -> Tensor:
        """int64 [D]: the target's id of each draft id."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids + self.d2t if self.config.draft_vocab_size < self.config.vocab_size else ids

    def knows(self, target_ids: Tensor) -> Tensor:
        """bool, of the same shape: the id is in the draft vocabulary, so that the drafter can propose it."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return torch.ones_like(target_ids, dtype=torch.bool)
        return self.t2d[target_ids]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions [T]."""
        return compute_rotation(positions, self.inverse_frequencies, self.rope_factor)

    def unroll(self, aux: Tensor, input_ids: Tensor, chain_ids: Tensor, rows: PackedRows) -> list[Tensor]:
        """Runs the training-time test: K normed states [M_k, H], ready for the head.

        Args:
            aux: [T, A*H] aux hidden states of all rows.
            input_ids: int64 [T], x_{t+1} of row t.
            chain_ids: int64 [M], x_P..x_{S-2} of each document: row i of step k takes entry i + k.
            rows: the layout; K = len(rows.steps).
        """
        layer, positions = self.midlayer, rows.positions
        state = self.fc(aux)
        joined = layer.join(F.embedding(input_ids, self.embed_tokens), state)
        keys, values = layer.self_attn.keys_values(joined, self.rotation(positions))

        positions = positions[rows.supervised]
        queries = layer.self_attn.queries(joined[rows.supervised], self.rotation(positions))
        state = layer.finish(attend(queries, keys, values, [], rows.documents), state[rows.supervised])
        normed = [self.norm(state)]
        later: list[tuple[Tensor, Tensor]] = []
        for step in range(1, len(rows.steps)):
            kept = rows.kept(step, of=step - 1)
            state = state[kept]
            later = [(key[kept], value[kept]) for key, value in later]
            joined = layer.join(F.embedding(chain_ids[rows.targets(step)], self.embed_tokens), state)
            rotation = self.rotation(positions[rows.steps[step]] + step)
            later.append(layer.self_attn.keys_values(joined, rotation))
            queries = layer.self_attn.queries(joined, rotation)
            state = layer.finish(attend(queries, keys, values, later, rows.documents), state)
            normed.append(self.norm(state))
        return normed
