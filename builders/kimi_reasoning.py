"""Reasoning-complete samples of a target model, generated once and cached.

    import datasets, eagle3_kimi
    samples = datasets.load_dataset("kimi_reasoning", data_files="prompts.jsonl", target="tiny")
    refused = datasets.load_dataset("kimi_reasoning", "quarantine", data_files="prompts.jsonl", target="tiny")

`data_files` are prompts or conversations in any understood shape, or a mix (`mix.yaml`), which is built first.

Generation happens in the process that prepares the data set; what a journal already holds is replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from eagle3_kimi.engines import SamplingOptions
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.errors import RunStopped, UsageError
from eagle3_kimi.features import build_features, build_quarantine_features
from eagle3_kimi.generation import GenerationConfig, GenerationRun, Journal, fingerprint, journal_key
from eagle3_kimi.generation.rows import split_of
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.hidden_states.formats import AuxDtype, FeatureFormat, Targets
from eagle3_kimi.prompts import RefusedRows, TokenCounter, load_conversations, open_prompts, prompts_digest
from eagle3_kimi.protocol import Reason
from eagle3_kimi.target import resolve_target
from eagle3_kimi.tiny import cache_dir

logger = logging.getLogger(__name__)


@dataclass
class KimiReasoningConfig(datasets.BuilderConfig):
    """Options of `load_dataset("kimi_reasoning", ...)`; see `GenerationConfig` for what each one does."""

    target: str = "moonshotai/Kimi-K2.5"
    target_revision: str | None = None
    trust_remote_code: bool = False
    engine: str = "vllm"
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 32768
    seed: int = 0
    samples_per_prompt: int = 1
    min_reasoning_tokens: int = 1
    validation_fraction: float = 0.05
    journal_dir: str | None = None
    retry_rejected: bool = False
    max_truncated: float = 0.5
    max_incomplete: float = 0.2
    breaker_window: int = 200
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    server_url: str = ""
    server_seconds_per_token: float = 0.25
    capture_hidden_states: str | None = None
    aux_layer_ids: Sequence[int] | None = None
    aux_dtype: AuxDtype = "fp8"
    targets: Targets = "topk"
    top_k: int = 64

    def generation_config(self) -> GenerationConfig:
        """The same options as the generation stage takes them."""
        return GenerationConfig(
            target=self.target,
            revision=self.target_revision,
            trust_remote_code=self.trust_remote_code,
            engine=self.engine,
            sampling=SamplingOptions(
                temperature=float(self.temperature), top_p=float(self.top_p), max_tokens=self.max_tokens
            ),
            seed=self.seed,
            samples_per_prompt=self.samples_per_prompt,
            min_reasoning_tokens=self.min_reasoning_tokens,
            validation_fraction=self.validation_fraction,
            journal_dir=Path(self.journal_dir) if self.journal_dir else None,
            retry_rejected=self.retry_rejected and self.name != "quarantine",  # once, not by each configuration
            max_truncated=self.max_truncated,
            max_incomplete=self.max_incomplete,
            breaker_window=self.breaker_window,
            capture=self._capture_config(),
            options=EngineOptions(
                tensor_parallel_size=self.tensor_parallel_size,
                dtype=self.dtype,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                gpu_memory_utilization=self.gpu_memory_utilization,
                server_url=self.server_url,
                server_seconds_per_token=self.server_seconds_per_token,
            ),
        )

    def _capture_config(self) -> CaptureConfig | None:
        if self.capture_hidden_states is None:
            return None
        return CaptureConfig(
            store=Path(self.capture_hidden_states),
            aux_layer_ids=tuple(self.aux_layer_ids) if self.aux_layer_ids else None,
            format=FeatureFormat(aux_dtype=self.aux_dtype, targets=self.targets, top_k=self.top_k),
        )

    def prompt_files(self) -> list[Path]:
        """The local files of prompts and mixes, in the order they were named."""
        splits: dict[str, Any] = dict(self.data_files or {})
        if set(splits) != {"train"}:
            raise UsageError(
                "kimi_reasoning needs data_files: files of prompts or a mix (.yaml), given as a path or a list. "
                f"It makes the splits itself; got {sorted(splits) or 'none'}"
            )
        return [Path(str(file)) for file in splits["train"]]

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Cache key: all that decides rows (prompts' content, target, sampling, seed, schema), defaults included."""
        if custom_features is not None:
            raise UsageError("kimi_reasoning has features of its own: they refuse what is not complete")
        generation = self.generation_config()
        target = resolve_target(
            generation.target, revision=generation.revision, trust_remote_code=generation.trust_remote_code
        )
        key = {
            "journal": journal_key(generation, target, target.load_tokenizer()),
            "prompts": prompts_digest(self.prompt_files(), count_tokens=TokenCounter(target)),
            "samples_per_prompt": self.samples_per_prompt,
            "validation_fraction": self.validation_fraction,
            "retry_rejected": self.retry_rejected,
        }
        return f"{self.name}-{fingerprint(key)}"


class KimiReasoning(datasets.GeneratorBasedBuilder):
    """Splits `train` and `validation` by conversation; the configuration `quarantine` holds what was refused."""

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = KimiReasoningConfig
    BUILDER_CONFIGS = [  # noqa: RUF012 - the shape datasets asks for
        KimiReasoningConfig(name="complete", version=VERSION, description="reasoning-complete samples"),
        KimiReasoningConfig(name="quarantine", version=VERSION, description="refused samples with their reasons"),
    ]
    DEFAULT_CONFIG_NAME = "complete"
    DEFAULT_WRITER_BATCH_SIZE = 100  # rows are long

    config: KimiReasoningConfig

    def download_and_prepare(self, *args: Any, download_mode: Any = None, **kwargs: Any) -> None:
        """With `capture_hidden_states` a cached data set is prepared again: only a run knows what the store lacks.

        Where it lacks nothing, that is a replay of the journal, without an engine.
        """
        if self.config.capture_hidden_states is not None:
            download_mode = datasets.DownloadMode.REUSE_CACHE_IF_EXISTS
        super().download_and_prepare(*args, download_mode=download_mode, **kwargs)

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description="Answers of a target model with their reasoning, as token ids.", features=self._features()
        )

    def _features(self) -> datasets.Features:
        if self.config.name == "quarantine":
            return build_quarantine_features()
        generation = self.config.generation_config()
        return build_features(resolve_target(generation.target, revision=generation.revision).vocab_size)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        run = GenerationRun(self.config.generation_config())
        files = open_prompts(self.config.prompt_files(), cache_dir=cache_dir(), count_tokens=TokenCounter(run.target))
        refused = RefusedRows()
        report = run.run(load_conversations(files, on_refused=refused))
        logger.info("%s", report)
        if refused.by_reason:
            logger.warning("%s", refused)
        wanted = self.config.name == "quarantine"
        if not report.complete and not wanted:
            raise RunStopped(
                f"no sample is complete, so there is no data set; the configuration `quarantine` holds them. {report}"
            )
        offsets: dict[str, list[int]] = {"train": [], "validation": []}
        for conversation_id, entry in report.finished_turns():
            if (entry.reason != Reason.OK) is wanted:
                split = split_of(conversation_id, self.config.validation_fraction)
                offsets[split].append(entry.offset)
        return [
            datasets.SplitGenerator(name=name, gen_kwargs={"journal": run.journal, "offsets": found})
            for name, found in offsets.items()
        ]

    def _as_dataset(self, split: datasets.Split, in_memory: bool = False) -> datasets.Dataset:
        """An empty split (nothing refused, no validation conversation) is a data set without rows, not an error.

        A cached data set comes back with plain features; it gets those that refuse, so that `map` goes on refusing.
        """
        features, splits = self._features(), self.info.splits or {}
        if str(split) in splits and not splits[str(split)].num_examples:
            return datasets.Dataset.from_dict({name: [] for name in features}, features=features, split=split)
        dataset = super()._as_dataset(split, in_memory)
        dataset.info.features = features
        return dataset

    def _generate_examples(self, journal: Journal, offsets: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Replays journaled samples; the list is split over `num_proc` processes, in order."""
        for offset in offsets:
            record = journal.read_at(offset)
            yield record["id"], record["row"]
