"""An exported drafter, driven one chain at a time as a serving engine drives it.

    after the target wrote x_{n+1}:   read(aux of the new positions, the tokens after them)   step-0 keys, kept
                                      propose(k): x_{n+2} .. x_{n+1+k}                        later keys, dropped

Training unrolls the same computation over all positions at once (`drafter.model`); this is its plain form.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from eagle3_kimi.drafter.config import DrafterConfig, read_rope
from eagle3_kimi.drafter.export import export_drafter
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.target import Target


class DraftChain:
    """Proposals for one sequence. A aux layers, H hidden size.

    Args:
        model: the drafter.
    """

    def __init__(self, model: DraftModel) -> None:
        config, weight = model.config, model.fc.weight
        self._model = model
        self._keys = weight.new_empty(0, config.num_key_value_heads, config.head_dim)
        self._values = torch.empty_like(self._keys)
        self._joined = self._state = weight.new_empty(0)

    def read(self, aux: Tensor, next_ids: Tensor) -> None:
        """Takes the target's states at positions not read yet.

        Args:
            aux: [M, A*H] aux hidden states, low to high.
            next_ids: int64 [M], the token after each of the positions.
        """
        layer, start = self._model.midlayer, len(self._keys)
        state = self._model.fc(aux)
        joined = layer.join(F.embedding(next_ids, self._model.embed_tokens), state)
        rotation = self._model.rotation(torch.arange(start, start + len(aux), device=aux.device))
        keys, values = layer.self_attn.keys_values(joined, rotation)
        self._keys, self._values = torch.cat((self._keys, keys)), torch.cat((self._values, values))
        self._joined, self._state = joined[-1:], state[-1:]

    def propose(self, num_tokens: int) -> list[int]:
        """Target ids of the greedy chain that follows the last token read."""
        layer, attention = self._model.midlayer, self._model.midlayer.self_attn
        keys, values, joined, state = self._keys, self._values, self._joined, self._state
        position = torch.tensor([len(keys) - 1], device=keys.device)
        proposals: list[Tensor] = []
        for step in range(num_tokens):
            rotation = self._model.rotation(position + step)
            if step:
                joined = layer.join(F.embedding(proposals[-1], self._model.embed_tokens), state)
                key, value = attention.keys_values(joined, rotation)
                keys, values = torch.cat((keys, key)), torch.cat((values, value))
            attended = F.scaled_dot_product_attention(
                attention.queries(joined, rotation).transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                enable_gqa=True,
            )
            state = layer.finish(attended.transpose(0, 1), state)
            draft_ids = self._model.lm_head(self._model.norm(state)).argmax(-1)
            proposals.append(self._model.draft_to_target[draft_ids])
        return torch.cat(proposals).tolist() if proposals else []


def load_draft_model(path: Path, target: Target, *, dtype: torch.dtype = torch.float32) -> DraftModel:
    """An exported drafter with its own or the target's embedding, in evaluation mode on the CPU."""
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    theta, scaling = read_rope(values)
    config = DrafterConfig(
        hidden_size=values["hidden_size"],
        vocab_size=values["vocab_size"],
        draft_vocab_size=values["draft_vocab_size"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        intermediate_size=values["intermediate_size"],
        aux_layer_ids=tuple(values["eagle_aux_hidden_state_layer_ids"]),
        target_num_layers=target.num_layers,
        max_position_embeddings=values["max_position_embeddings"],
        rms_norm_eps=values["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
    )
    model = DraftModel(config).to(dtype)
    tensors = load_file(path / "model.safetensors")
    own_embedding = tensors.pop("embed_tokens.weight", None)
    model.load_state_dict(tensors)
    model.embed_tokens = (target.read_tensor("embed_tokens") if own_embedding is None else own_embedding).to(dtype)
    return model.eval()


def export_untrained_drafter(trained: Path, out_dir: Path, *, target: Target, seed: int) -> None:
    """Writes a drafter that has learnt nothing, under the target's head: what every gain is measured against.

    Args:
        trained: an exported drafter, for its sizes and vocabulary map.
        out_dir: replaced if it exists.
        target: the target model.
        seed: of the random matrices.
    """
    model = load_draft_model(trained, target)
    head = target.read_tensor("lm_head", model.draft_to_target).float()
    final_norm = target.read_tensor("final_norm").float()
    model.initialise(embed_tokens=model.embed_tokens, lm_head=head, final_norm=final_norm, seed=seed)
    export_drafter(model, out_dir, target=target)
