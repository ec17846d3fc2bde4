"""What a run starts from: checked data, vocabulary map, initialised model."""

from __future__ import annotations

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
from eagle3_kimi.training.spans import SPAN_NAMES, read_span_kinds
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


@dataclass(frozen=True, kw_only=True)
class DraftVocab:
    """The vocabulary map and what it covers."""

    vocab_map: VocabMap
    coverage: dict[str, float]
    """`measure_coverage` of the validation split (of the training split if there is none)."""


def open_draft_vocab(config: TrainConfig, target: Target, train: FeatureStore, validation: FeatureStore) -> DraftVocab:
    """The run's `vocab_map.safetensors`, built first if there is none (so: the main process first).

    It keeps the most frequent supervised tokens of the training split, and the control markers however rare.

    Raises:
        DataError: the file belongs to other data or sizes.
    """
    size = config.draft_vocab_size or target.vocab_size
    forced: tuple[int, ...] = ()
    if size < target.vocab_size and config.force_markers:
        forced = target.load_protocol(target.load_tokenizer()).markers.forced_draft_ids
    file = config.output / "vocab_map.safetensors"
    if not file.is_file():
        counts = _count_supervised(train, target.vocab_size).sum(dim=0)
        data = train.fingerprint
        build_vocab_map(counts, draft_vocab_size=size, forced_ids=forced, data_fingerprint=data).save(file)
    fingerprint = vocab_fingerprint(train.fingerprint, size, target.vocab_size, forced)
    vocab_map = VocabMap.load(file, draft_vocab_size=size, vocab_size=target.vocab_size, fingerprint=fingerprint)
    coverage = measure_coverage(validation if len(validation) else train, vocab_map, target.vocab_size)
    return DraftVocab(vocab_map=vocab_map, coverage=coverage)


def measure_coverage(store: FeatureStore, vocab_map: VocabMap, vocab_size: int) -> dict[str, float]:
    """Share of a split's supervised tokens inside the draft vocabulary: `all`, and each part of an answer there is."""
    counts = _count_supervised(store, vocab_size)
    parts = {"all": counts.sum(dim=0), **dict(zip(SPAN_NAMES, counts, strict=True))}
    return {name: compute_coverage(part, vocab_map) for name, part in parts.items() if name == "all" or part.any()}


def needs_final_norm(manifest: StoreManifest) -> bool:
    """Whether stored final states are still to be normed: exactly one norm stands before the head."""
    return manifest.final_pre_norm


def build_training_module(
    config: TrainConfig, target: Target, vocab_map: VocabMap, manifest: StoreManifest, *, channel_sizes: Tensor
) -> TrainingTimeTest:
    """The drafter, initialised from the target's embedding, head rows and final norm, inside its training-time test.

    `channel_sizes`: float32 [A*H], of `measure_channel_sizes`.
    """
    draft_model = DraftModel(
        DrafterConfig.for_target(
            target.config,
            draft_vocab_size=len(vocab_map.target_ids),
            aux_layer_ids=manifest.aux_layer_ids,
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
    draft_model.start_near_target(aux_size=float(channel_sizes[-target.hidden_size :].median()))
    if len(vocab_map.target_ids) < target.vocab_size:
        draft_model.d2t.copy_(vocab_map.d2t)
        draft_model.t2d.copy_(vocab_map.t2d)
    return TrainingTimeTest(
        draft_model,
        target_head=head,
        final_norm=final_norm if needs_final_norm(manifest) else None,
        final_norm_eps=target.rms_norm_eps,
        ttt_steps=config.ttt_steps,
        ttt_step_decay=config.ttt_step_decay,
        objective=config.objective,
        chunk=config.head_chunk,
    )


def _count_supervised(store: FeatureStore, vocab_size: int) -> Tensor:
    """int64 [spans, V]: tokens that a chain may predict, all of an output but its first, which the target samples."""
    counts = count_tokens(
        (read_span_kinds(sample) * vocab_size + sample.token_ids[sample.num_prompt_tokens + 1 :] for sample in store),
        len(SPAN_NAMES) * vocab_size,
    )
    return counts.view(len(SPAN_NAMES), vocab_size)
