"""A small random drafter over a reduced vocabulary, and a target folder that it belongs to."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.vocab import build_vocab_map
from eagle3_kimi.target import Target

VOCAB, DRAFT_VOCAB, HIDDEN = 40, 24, 32


def write_toy_target(folder: Path) -> Target:
    """Config, embedding, head and norm: all that a drafter needs of a target."""
    folder.mkdir()
    config = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
            "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
            "model.norm.weight": torch.rand(HIDDEN, generator=generator) + 0.5,
        },
        folder / "model.safetensors",
    )
    return Target(name="toy", path=folder, revision="0")


def build_toy_drafter(target: Target, *, seed: int = 3) -> DraftModel:
    """Grouped heads, a vocabulary map, random weights."""
    counts = torch.arange(VOCAB) % 7  # so that the map is not the first ids
    vocab = build_vocab_map(counts, draft_vocab_size=DRAFT_VOCAB)
    model = DraftModel(DrafterConfig.for_target(target.config, draft_vocab_size=DRAFT_VOCAB, aux_layer_ids=(1, 2, 3)))
    model.initialise(
        embed_tokens=target.read_tensor("embed_tokens"),
        lm_head=target.read_tensor("lm_head", vocab.target_ids),
        final_norm=target.read_tensor("final_norm"),
        seed=seed,
    )
    model.d2t.copy_(vocab.d2t)
    model.t2d.copy_(vocab.t2d)
    return model.eval()
