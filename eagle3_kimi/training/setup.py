"""What a run starts from: checked data, vocabulary map, initialised model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.target_mlp import TargetMLP
from eagle3_kimi.drafter.vocab import VocabMap, build_vocab_map, compute_coverage, count_tokens, vocab_fingerprint
from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.disk import parse_size
from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.plan import PlanRequest, check_online
from eagle3_kimi.target import Target
from eagle3_kimi.target_sizes import TargetSizes
from eagle3_kimi.training.config import LiveOptions, TrainConfig
from eagle3_kimi.training.online import OnlineFeatures
from eagle3_kimi.training.ring import RingFeatures
from eagle3_kimi.training.sources import FeatureSource, Split, StoredFeatures
from eagle3_kimi.training.spans import SPAN_NAMES, read_span_kinds
from eagle3_kimi.training.ttt import TrainingTimeTest


def open_features(config: TrainConfig, live: LiveOptions, target: Target) -> FeatureSource:
    """Where the run's features come from. Called by every launched process.

    Raises:
        UsageError: options that contradict each other, or a limit, a disk or GPUs that are too small.
        DataError: a store that is not proven, or not the target's; a damaged data set.
    """
    dataset = live.dataset
    if dataset is None:
        if config.store is None:
            raise UsageError("expected --store DIR, or --dataset DIR with --max-disk SIZE or --online; none came")
        return StoredFeatures(config.store, target, Ranks.join(1))
    if live.online and config.store is not None:
        raise UsageError(f"--online keeps nothing on the disk: leave out --store {config.store}")
    ranks = Ranks.join(live.tensor_parallel_size)
    if live.online and ranks.device.type == "cuda":
        live = _share_gpu(config, live, target, ranks)
    extraction = Extraction(
        live, dataset, target, ranks, max_length=config.max_length, sleeps=live.max_disk is not None
    )
    if live.max_disk is None:
        return OnlineFeatures(extraction, max_length=config.max_length)
    return RingFeatures(
        extraction,
        config.store or config.output / "parts",
        parse_size(live.max_disk),
        max_length=config.max_length,
        step_tokens=config.batch_tokens,
    )


def _share_gpu(config: TrainConfig, live: LiveOptions, target: Target, ranks: Ranks) -> LiveOptions:
    """Keeps the engine to the memory that the trainer leaves; refuses what does not fit."""
    request = PlanRequest(
        target=TargetSizes(name=target.name, config=target.config),
        samples=1,
        mean_tokens=config.max_length,
        answer_share=1.0,
        num_gpus=ranks.world_size,
        gpu_bytes=torch.cuda.get_device_properties(ranks.device).total_memory,
        ttt_steps=config.ttt_steps,
        micro_batch_tokens=config.micro_batch_tokens,
        trained=describe_drafter(
            config, target, config.draft_vocab_size or target.vocab_size, live.aux_layer_ids or (1, 2, 3)
        ),
    )
    share = check_online(request, live.tensor_parallel_size)
    return replace(live, engine_args={"gpu_memory_utilization": share, **live.engine_args})


@dataclass(frozen=True, kw_only=True)
class DraftVocab:
    """The vocabulary map and what it covers."""

    vocab_map: VocabMap
    coverage: dict[str, float]
    """`measure_coverage` of the validation split (of the training split if there is none)."""


def open_draft_vocab(config: TrainConfig, target: Target, train: Split, validation: Split) -> DraftVocab:
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


def measure_coverage(split: Split, vocab_map: VocabMap, vocab_size: int) -> dict[str, float]:
    """Share of a split's supervised tokens inside the draft vocabulary: `all`, and each part of an answer there is."""
    counts = _count_supervised(split, vocab_size)
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
    draft_model = DraftModel(describe_drafter(config, target, len(vocab_map.target_ids), manifest.aux_layer_ids))
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    head = target.read_tensor("lm_head", vocab_map.target_ids).to(dtype)
    final_norm = target.read_tensor("final_norm").float()
    draft_model.initialise(
        embed_tokens=target.read_tensor("embed_tokens").to(dtype), lm_head=head, final_norm=final_norm, seed=config.seed
    )
    draft_model.start_near_target(
        aux_size=float(channel_sizes[-target.hidden_size :].median()),
        mlp=TargetMLP.read(target, min(manifest.aux_layer_ids[-1] + 1, target.num_layers - 1)),
    )
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


def describe_drafter(
    config: TrainConfig, target: Target, draft_vocab_size: int, aux_layer_ids: tuple[int, ...]
) -> DrafterConfig:
    """The drafter's configuration: the run's sizes, else the target's."""
    return DrafterConfig.for_target(
        target.config,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=aux_layer_ids,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
    )


def _count_supervised(split: Split, vocab_size: int) -> Tensor:
    """int64 [spans, V]: tokens that a chain may predict, all of an output but its first, which the target samples."""
    counts = count_tokens(
        (
            read_span_kinds(sample) * vocab_size + sample.token_ids[sample.num_prompt_tokens + 1 :]
            for sample in map(split.__getitem__, range(len(split)))
        ),
        len(SPAN_NAMES) * vocab_size,
    )
    return counts.view(len(SPAN_NAMES), vocab_size)
