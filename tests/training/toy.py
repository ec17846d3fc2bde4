"""A toy target whose next token is a function of the last two, and samples it could have produced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.hidden_states.store import FeatureFormat, FeatureSample, FeatureStoreWriter, StoreManifest
from eagle3_kimi.protocol import Span, SpanKind
from eagle3_kimi.target import Target, folder_digest
from eagle3_kimi.training.ttt import TrainingTimeTest

VOCAB, HIDDEN, LAYERS, AUX = 40, 32, 4, (1, 2, 3)


class ToyTarget:
    """Heads, embeddings, "hidden states": the final state points at the next token, the aux states mix the context."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embed_tokens = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.lm_head = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.final_norm = torch.rand(HIDDEN, generator=generator) + 0.5
        self.mix = torch.randn(2 * HIDDEN, len(AUX) * HIDDEN, generator=generator) * (2 * HIDDEN) ** -0.5

    def save(self, path: Path) -> Target:
        path.mkdir(parents=True)
        config = {
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "dtype": "float32",
        }
        (path / "config.json").write_text(json.dumps(config))
        tensors = {
            "model.embed_tokens.weight": self.embed_tokens,
            "lm_head.weight": self.lm_head,
            "model.norm.weight": self.final_norm,
        }
        save_file(tensors, path / "model.safetensors")
        return Target(name=str(path), path=path, revision=folder_digest(path))

    def sample(self, index: int, *, prompt: int, output: int, split: str = "train") -> FeatureSample:
        """Tokens follow x_{t+1} = (3 x_t + x_{t-1}) mod 20, so half of the vocabulary never occurs."""
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(20, (2,), generator=generator).tolist()
        while len(tokens) < prompt + output + 1:
            tokens.append((3 * tokens[-1] + tokens[-2]) % 20)
        ids, following = torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])
        embedded = self.embed_tokens[ids]
        context = torch.cat((embedded, torch.roll(embedded, 1, 0)), dim=-1) @ self.mix
        final = self.lm_head[following] + 0.1 * torch.randn(len(ids), HIDDEN, generator=generator)
        supervised = final[prompt:-1]
        return FeatureSample(
            id=f"toy-{index:04d}",
            split=split,
            token_ids=ids,
            num_prompt_tokens=prompt,
            spans=(Span(SpanKind.REASONING, 0, output // 2), Span(SpanKind.ANSWER, output // 2 + 1, output - 1)),
            aux_hidden_states=context[:-1].contiguous(),
            final_hidden_states=supervised.contiguous(),
            target_argmax=self.logits(supervised).argmax(-1),
        )

    def logits(self, final: Tensor) -> Tensor:
        """[n, V] of final states [n, H]."""
        normed = final * (final.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.final_norm
        return normed @ self.lm_head.T


def build_toy_module(*, ttt_steps: int, draft_vocab_size: int = VOCAB) -> TrainingTimeTest:
    """The training-time test of a drafter over the first `draft_vocab_size` ids."""
    toy = ToyTarget()
    config = DrafterConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        aux_layer_ids=AUX,
        target_num_layers=LAYERS,
        max_position_embeddings=256,
    )
    model, head = DraftModel(config), toy.lm_head[:draft_vocab_size]
    model.initialise(embed_tokens=toy.embed_tokens, lm_head=head, final_norm=toy.final_norm, seed=0)
    if draft_vocab_size < VOCAB:
        model.t2d[:draft_vocab_size] = True  # the first ids: their offsets are zero
    return TrainingTimeTest(
        model, target_head=head, final_norm=toy.final_norm, final_norm_eps=1e-5, ttt_steps=ttt_steps
    )


def toy_manifest(target: Target) -> StoreManifest:
    return StoreManifest(
        target=target.name,
        target_revision=target.revision,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        vocab_size=VOCAB,
        aux_layer_ids=AUX,
        dtype="float32",
        format=FeatureFormat(aux_dtype="fp32", targets="state"),
        dataset_fingerprint="toy",
        protocol="toy",
        contract={"passed": True, "agreement": 1.0},
    )


def write_toy_run(folder: Path, *, samples: int = 24, poisoned: str = "") -> tuple[Target, Path]:
    """A target folder and a feature store of samples of uneven lengths; the states of one may be near the overflow."""
    toy = ToyTarget()
    target = toy.save(folder / "target")
    with FeatureStoreWriter(folder / "store", toy_manifest(target)) as writer:
        for index in range(samples):
            split = "validation" if index % 6 == 0 else "train"
            sample = toy.sample(index, prompt=2 + index % 5, output=4 + 3 * (index % 7), split=split)
            if sample.id == poisoned:
                sample = replace(sample, aux_hidden_states=torch.full_like(sample.aux_hidden_states, 3e38))
            writer.add(sample)
    return target, folder / "store"
