"""What a run starts from: checked data, vocabulary map, initialised model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.vocab import VocabMap, build_vocab_map, compute_coverage, count_tokens, vocab_fingerprint
from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.store import FeatureStore, StoreManifest
from eagle3_kimi.target import Target
from eagle3_kimi.training.config import TrainConfig
from eagle3_kimi.training.ttt import TrainingTimeTest


def check_manifest(manifest: StoreManifest, target: Target, path: Path) -> None:
    """Refuses a store that was not proven to hold this target's states.

    Raises:
        DataError: no contract check, a failed one, or another target.
    """
    if not (manifest.contract or {}).get("passed"):
        came = (
            "has no contract check" if manifest.contract is None else f"failed its contract check: {manifest.contract}"
        )
        raise DataError(f"the feature store {path} {came}; training on unproven states is refused: extract it again")
    expected = (target.revision, target.hidden_size, target.vocab_size, target.num_layers)
    came_from = (manifest.target_revision, manifest.hidden_size, manifest.vocab_size, manifest.num_layers)
    if expected != came_from:
        raise DataError(
            f"the feature store {path} holds states of {manifest.target} (revision, hidden size, vocabulary, layers: "
            f"{came_from}), the target is {target.name} {expected}"
        )
    if not manifest.final_pre_norm:
        raise DataError(f"the feature store {path} holds final states after the final norm; it would be applied twice")


@dataclass(frozen=True, kw_only=True)
class DraftVocab:
    """The vocabulary map and what it covers."""

    vocab_map: VocabMap
    coverage: float
    """`draft_vocab_coverage`: share of the validation split's supervised tokens (training split if there is none)."""


def open_draft_vocab(config: TrainConfig, target: Target, train: FeatureStore, validation: FeatureStore) -> DraftVocab:
    """The run's `vocab_map.safetensors`, built first if there is none (so: the main process first).

    It keeps the most frequent supervised tokens of the training split, and the control markers however rare.

    Raises:
        DataError: the file belongs to other data or sizes.
    """
    size = config.draft_vocab_size or target.vocab_size
    forced: tuple[int, ...] = ()
    if size < target.vocab_size:
        forced = target.load_protocol(target.load_tokenizer()).markers.forced_draft_ids
    file = config.output / "vocab_map.safetensors"
    counts = count_tokens(_supervised_tokens(train), target.vocab_size)
    if not file.is_file():
        build_vocab_map(counts, draft_vocab_size=size, forced_ids=forced, data_fingerprint=train.fingerprint).save(file)
    fingerprint = vocab_fingerprint(train.fingerprint, size, target.vocab_size, forced)
    vocab_map = VocabMap.load(file, draft_vocab_size=size, vocab_size=target.vocab_size, fingerprint=fingerprint)
    held_out = count_tokens(_supervised_tokens(validation), target.vocab_size) if len(validation) else counts
    return DraftVocab(vocab_map=vocab_map, coverage=compute_coverage(held_out, vocab_map))


def build_training_module(
    config: TrainConfig, target: Target, vocab_map: VocabMap, aux_layer_ids: tuple[int, ...]
) -> TrainingTimeTest:
    """The drafter, initialised from the target's embedding, head rows and final norm, inside its training-time test."""
    draft_model = DraftModel(
        DrafterConfig.for_target(
            target.config,
            draft_vocab_size=len(vocab_map.target_ids),
            aux_layer_ids=aux_layer_ids,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
        )
    )
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    head = target.read_tensor("lm_head", vocab_map.target_ids).to(dtype)
    final_norm = target.read_tensor("final_norm").float()
    draft_model.initialise(
        embed_tokens=target.read_tensor("embed_tokens").to(dtype), lm_head=head, final_norm=final_norm, seed=config.seed
    )
    if len(vocab_map.target_ids) < target.vocab_size:
        draft_model.d2t.copy_(vocab_map.d2t)
        draft_model.t2d.copy_(vocab_map.t2d)
    return TrainingTimeTest(
        draft_model,
        target_head=head,
        final_norm=final_norm,
        final_norm_eps=target.rms_norm_eps,
        ttt_steps=config.ttt_steps,
        ttt_step_decay=config.ttt_step_decay,
        objective=config.objective,
        chunk=config.head_chunk,
    )


def _supervised_tokens(store: FeatureStore) -> Iterable[Tensor]:
    """Of each sample, the tokens a chain may predict: all of the output but its first, which the target samples."""
    return (store[i].token_ids[store[i].num_prompt_tokens + 1 :] for i in range(len(store)))
