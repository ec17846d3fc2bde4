"""Trains a drafter on a feature store, under `accelerate launch` or alone."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from eagle3_kimi.drafter.export import write_drafter
from eagle3_kimi.target import Target, resolve_target
from eagle3_kimi.training.batches import PackedBatch, cut_batches, plan_epoch, select_held_out, select_trainable
from eagle3_kimi.training.channels import ChannelRates, choose_looked_at, measure_channel_sizes
from eagle3_kimi.training.checkpoint import check_rate_continues, load_checkpoint, save_checkpoint
from eagle3_kimi.training.config import LiveOptions, TrainConfig
from eagle3_kimi.training.feed import StepInput, feed_steps, read_everywhere
from eagle3_kimi.training.launch import build_accelerator, start_tracker
from eagle3_kimi.training.log import MetricsLog, describe_chains, write_text
from eagle3_kimi.training.metrics import Counts
from eagle3_kimi.training.progress import TrainProgress
from eagle3_kimi.training.ring import set_aside
from eagle3_kimi.training.setup import build_training_module, open_draft_vocab, open_features
from eagle3_kimi.training.sources import FeatureSource
from eagle3_kimi.training.step import FiniteGuard, StepTrace, apply_gradients

logger = logging.getLogger(__name__)


def train_drafter(config: TrainConfig, live: LiveOptions | None = None) -> dict[str, Any]:
    """Trains, evaluates and exports; the content of `training.json`. A run that was interrupted goes on from its last
    checkpoint, a finished one is reused.

    Args:
        config: the run.
        live: how hidden states are made on the way; None where the run has a store.

    Raises:
        DataError: the states are not proven, not of this target, or there are none.
        UsageError: the world size, the precision, the strategy or the output folder is not the run's; what --max-disk
            or --online asks for does not fit.
        RunStopped: the loss or the gradient is not finite; names the samples.
    """
    live = live or LiveOptions()
    accelerator = build_accelerator(
        expected_world_size=config.expected_world_size,
        precision=config.precision,
        tracker=config.tracker,
        output=config.output,
    )
    target = resolve_target(config.target, trust_remote_code=config.trust_remote_code)
    with open_features(config, live, target) as source:
        plain = {**config.as_plain(), **live.as_plain()}
        return _train_on(source, config, accelerator, target, plain)


def _train_on(
    source: FeatureSource, config: TrainConfig, accelerator: Accelerator, target: Target, plain: dict[str, Any]
) -> dict[str, Any]:
    """`train_drafter` on a source of features; `plain` is for config.yaml."""
    identity = config.identity(source.train.fingerprint, target.revision)
    summary_file = config.output / "training.json"
    if summary_file.is_file():
        summary: dict[str, Any] = json.loads(summary_file.read_text(encoding="utf-8"))
        if summary["identity"] == identity:
            logger.info("%s is finished: reused", config.output)
            return summary
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        config.output.mkdir(parents=True, exist_ok=True)
        write_text(config.output / "config.yaml", yaml.safe_dump(plain, sort_keys=False))
    run = _Run(config, accelerator, target, source, identity)
    summary = run.train()
    if accelerator.is_main_process:
        write_text(summary_file, json.dumps(summary, indent=2))
    accelerator.wait_for_everyone()
    return summary


class _Run:
    """The state of one run on one rank."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        target: Target,
        source: FeatureSource,
        identity: str,
    ) -> None:
        self.config, self.accelerator, self.target, self.identity = config, accelerator, target, identity
        self.source, train, validation = source, source.train, source.validation
        indices, self.refused = select_trainable(train, config.max_length)
        self.held_out, self.refused_validation = select_held_out(validation, config.max_length)
        for split, refused in (("train", self.refused), ("validation", self.refused_validation)):
            if any(refused.values()) and accelerator.is_main_process:
                logger.warning("refused of the %s split, max_length %d: %s", split, config.max_length, refused)
        self.plan = [
            batch
            for epoch in range(config.epochs)
            for batch in plan_epoch(
                indices, train.lengths, batch_tokens=config.batch_tokens, seed=config.seed, epoch=epoch
            )
        ][: config.max_steps]
        with accelerator.main_process_first():
            self.vocab = open_draft_vocab(config, target, train, validation)
        looked_at = read_everywhere(source, choose_looked_at(indices), world_size=accelerator.num_processes)
        sizes = broadcast(measure_channel_sizes(looked_at).to(accelerator.device))
        module = build_training_module(config, target, self.vocab.vocab_map, train.manifest, channel_sizes=sizes.cpu())
        self.drafter_config = module.draft_model.config
        optimizer = torch.optim.AdamW(
            module.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.model, self.optimizer = accelerator.prepare(module, optimizer)
        self.parameters = list(self.model.parameters())
        self.aside = partial(set_aside, self.model, self.optimizer, accelerator.device)
        (fc,) = [weight for name, weight in self.model.named_parameters() if name.endswith("fc.weight")]
        self.channel_rates = ChannelRates(fc, sizes)

    def train(self) -> dict[str, Any]:
        """Runs the steps that are left and everything after them."""
        config, total, main = self.config, len(self.plan), self.accelerator.is_main_process
        checkpoints = config.output / "checkpoints"
        first = load_checkpoint(self.accelerator, checkpoints, identity=self.identity)
        if first:
            saved = self.optimizer.param_groups[0]["lr"]
            check_rate_continues(saved, compute_learning_rate(first, total, config), step=first)
        name = config.output.resolve().name
        start_tracker(self.accelerator, config.as_plain(), name=name, identity=self.identity, first=first)
        log = MetricsLog(config.output / "metrics.jsonl", first, active=main, track=self.accelerator.log)
        guard = FiniteGuard()
        steps = self._feed("train", self.plan, start=first)
        with TrainProgress(total, first, active=main) as progress:
            for step, (batches, micro_batches) in enumerate(steps, start=first + 1):
                rate = compute_learning_rate(step, total, config)
                totals, trace = self._step(step, batches, micro_batches, rate)
                guard.add(trace)
                log.add(totals)
                last = step == total
                saving = step % config.checkpoint_every == 0 or last
                evaluating = bool(config.evaluate_every) and step % config.evaluate_every == 0 and not last
                if saving or evaluating or step % config.log_every == 0:
                    guard.finish()
                    progress.advance(step, log.write(step, lr=rate, grad_norm=trace.grad_norm))
                if evaluating:
                    log.write_evaluation(step, self.evaluate())
                if saving:
                    save_checkpoint(
                        self.accelerator,
                        checkpoints,
                        step=step,
                        identity=self.identity,
                        keep=config.keep_checkpoints,
                        origin=self._describe_origin(),
                    )
        held_out = self.evaluate()
        log.write_evaluation(total, held_out)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self._export()
        return self._summarise(held_out, log)

    def _step(
        self, step: int, batches: Iterator[PackedBatch], micro_batches: int, rate: float
    ) -> tuple[Tensor, StepTrace]:
        """One optimizer step over this rank's micro-batches; the sums of all ranks, and where they come from."""
        totals = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        traced = []
        for index in range(micro_batches):
            batch = next(batches).to(self.accelerator.device)
            waiting = index < micro_batches - 1
            with self.accelerator.no_sync(self.model) if waiting else contextlib.nullcontext():
                loss, vector = self.model(batch)
                self.accelerator.backward(loss)
            totals = totals + vector
            traced.append((batch.ids, vector[0]))
        totals = self.accelerator.reduce(totals, reduction="sum")
        norm = apply_gradients(
            self.parameters,
            self.optimizer,
            supervised_tokens=totals[1],
            world_size=self.accelerator.num_processes,
            max_grad_norm=self.config.max_grad_norm,
            learning_rate=rate,
            channel_rates=self.channel_rates,
        )
        return totals, StepTrace(step=step, loss_sum=totals[0], grad_norm=norm, micro_batches=traced)

    @torch.no_grad()
    def evaluate(self) -> Counts | None:
        """Counts over the validation split; None where there is none to judge by."""
        if not self.held_out:
            return None
        lengths = self.source.validation.lengths
        steps = cut_batches(self.held_out, lengths, batch_tokens=self.config.batch_tokens)
        totals = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        for batches, micro_batches in self._feed("validation", steps):
            for batch in islice(batches, micro_batches):
                totals = totals + self.model(batch.to(self.accelerator.device))[1]
        return Counts.unpack(self.accelerator.reduce(totals, reduction="sum").cpu())

    def _feed(self, split: str, batches: list[list[int]], *, start: int = 0) -> Iterator[StepInput]:
        config = self.config
        return feed_steps(
            self.source,
            split,
            batches,
            micro_batch_tokens=config.micro_batch_tokens,
            world_size=self.accelerator.num_processes,
            ttt_steps=config.ttt_steps,
            num_workers=config.num_workers,
            start=start,
            aside=self.aside,
        )

    def _describe_origin(self) -> dict[str, Any]:
        target = {"target": self.target.name, "target_revision": self.target.revision}
        return {**target, "drafter": asdict(self.drafter_config)}

    def _export(self) -> None:
        state = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            tensors = {name.removeprefix("draft_model."): tensor for name, tensor in state.items()}
            write_drafter(self.drafter_config, tensors, self.config.output / "export", target=self.target)

    def _summarise(self, held_out: Counts | None, log: MetricsLog) -> dict[str, Any]:
        counts = held_out or log.last
        return {
            "identity": self.identity,
            "steps": len(self.plan),
            "supervised_tokens": int(log.supervised_tokens),
            "ttt_steps": self.config.ttt_steps,
            "world_size": self.accelerator.num_processes,
            "evaluated_on": "validation" if held_out else "train",
            "loss": counts.loss if counts else None,
            "acceptance": list(counts.total.acceptance) if counts else None,
            "simulated_acceptance_length": counts.total.simulated_acceptance_length if counts else None,
            **(describe_chains(counts) if counts else {}),
            "draft_vocab_size": self.drafter_config.draft_vocab_size,
            "draft_vocab_coverage": self.vocab.coverage["all"],
            "draft_vocab_coverage_by_span": {k: v for k, v in self.vocab.coverage.items() if k != "all"},
            "refused": self.refused,
            "refused_validation": self.refused_validation,
            "drafter": str(self.config.output / "export"),
        }


def compute_learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Rate of step 1..total: linear warm-up, then a cosine to zero. A function of the step alone: nothing to resume."""
    warmup = max(1, round(config.warmup_ratio * total))
    if step <= warmup:
        return config.learning_rate * step / warmup
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))
