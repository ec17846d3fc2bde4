"""Training on a bounded disk: extract a part, train on it, delete it, on the same processes.

A part is as many consecutive steps as have room for their samples, each sample once. So the order of extraction is the
trainer's, and a part that holds the whole split serves every epoch:

    steps          1  2  3 | 4  5 | 6  7  8 ...
    samples        a b  c d| e  b | f g  a          b and a are extracted again: their first part is gone

A part is a feature store in a folder of its own, named after what it holds. Killed in the middle, the run finds the
part again and extracts only the shards that it lacks. The validation split has a part of its own beside the training
split's, which stays as long as it is the only one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.disk import check_free_space, show_size
from eagle3_kimi.hidden_states.extract import count_bytes, find_remaining
from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.samples import SampleRef
from eagle3_kimi.hidden_states.shards import write_json
from eagle3_kimi.hidden_states.store import FeatureStore
from eagle3_kimi.training.live import LiveSplit
from eagle3_kimi.training.sources import Aside, MicroBatchPlan, Part, check_manifest

logger = logging.getLogger(__name__)

_VALIDATION_SHARE = 4
"""One part in so many of the limit is the most that the validation split takes."""
_WHOLE = "whole.json"


class RingFeatures:
    """Parts of a data set that come and go.

    Args:
        extraction: makes them; its engine sleeps in between.
        folder: where they are kept, by one run at a time; all processes see it.
        max_bytes: what they may take at once.
        max_length: longer samples are not trained on.
        step_tokens: most tokens of a step, where it has more than one sample.

    Raises:
        UsageError: the folder is a feature store, its disk has not that much room, or not even a step fits.
    """

    on_disk = True

    def __init__(
        self, extraction: Extraction, folder: Path, max_bytes: int, *, max_length: int, step_tokens: int
    ) -> None:
        self._extraction, self._ranks, self._folder = extraction, extraction.ranks, folder
        self._splits = {name: LiveSplit(extraction, name) for name in ("train", "validation")}
        self.train, self.validation = self._splits.values()
        if (folder / "store.json").exists():
            raise UsageError(f"{folder} is a feature store: train on it without --max-disk, or name another folder")
        usable = {
            name: [ref for ref in split.refs if ref.num_tokens <= max_length] for name, split in self._splits.items()
        }
        self._sizes = {ref.id: count_bytes([ref], extraction.manifest) for refs in usable.values() for ref in refs}
        whole = {name: sum(self._sizes[ref.id] for ref in refs) for name, refs in usable.items()}
        held_out = min(whole["validation"], max_bytes // _VALIDATION_SHARE)
        self._limits = {"train": max_bytes - held_out, "validation": held_out}
        for name, refs in usable.items():
            step = min(whole[name], largest_step(refs, self._sizes, step_tokens))
            check_step_fits(name, step, limit=self._limits[name], max_bytes=max_bytes)
        kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        check_free_space(folder, min(max_bytes, sum(whole.values())) - kept)

    def parts(self, split: str, steps: Sequence[MicroBatchPlan], *, start: int, aside: Aside) -> Iterator[Part]:
        """Each is gone when the next one of its split is made.

        Raises:
            DataError: states that fail the contract.
            RunStopped: later ones do, or too many samples were refused.
        """
        refs, ranks = self._splits[split].refs, self._ranks
        sizes = {index: self._sizes[refs[index].id] for step in steps for micro in step for index in micro}
        samples = [{index for micro in step for index in micro} for step in steps]
        for part in cut_parts(samples, sizes, limit=self._limits[split]):
            if part.stop <= start:
                continue
            indices = sorted(set().union(*samples[part.start : part.stop]))
            folder = self._extract(split, [refs[index] for index in indices], aside)
            store = FeatureStore(folder)
            check_manifest(store.manifest, self._extraction.target, folder)
            numbers = {sample: number for number, sample in enumerate(store.ids)}
            held = {index: numbers[refs[index].id] for index in indices if refs[index].id in numbers}
            own = [step[ranks.rank :: ranks.world_size] for step in steps[max(part.start, start) : part.stop]]
            yield Part(store, [[[held[index] for index in micro if index in held] for micro in step] for step in own])
            store.close()

    def _extract(self, split: str, refs: list[SampleRef], aside: Aside) -> Path:
        """The folder of a part, whole."""
        named = json.dumps([self._splits[split].fingerprint, [ref.id for ref in refs]])
        folder = self._folder / f"part-{split}-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
        whole = self._ranks.gather((folder / _WHOLE).is_file())[0]  # and nobody reads the last part any more
        if self._ranks.rank == 0:
            self._delete(split, keep=folder)
        if whole:
            return folder
        if self._ranks.rank == 0:
            size = show_size(sum(self._sizes[ref.id] for ref in refs))
            logger.info("a part of the %s split: %d samples, %s", split, len(refs), size)
        remaining = find_remaining(folder, self._extraction.manifest, refs, self._ranks)
        with aside():
            self._extraction.write(remaining, folder)
        if self._ranks.rank == 0:
            write_json(folder / _WHOLE, {"samples": len(refs)})
        return folder

    def _delete(self, split: str, *, keep: Path | None = None) -> None:
        for folder in self._folder.glob(f"part-{split}-{'[0-9a-f]' * 16}"):
            if folder != keep:
                shutil.rmtree(folder)

    def __enter__(self) -> RingFeatures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._ranks.rank == 0:  # an interrupted run goes on with what is there
            for split in self._splits:
                self._delete(split)
        self._extraction.close()


def largest_step(refs: Sequence[SampleRef], sizes: Mapping[str, int], step_tokens: int) -> int:
    """Bytes that no step of at most `step_tokens` tokens, or of one sample, exceeds."""
    rate = max((sizes[ref.id] / ref.num_tokens for ref in refs), default=0.0)
    return math.ceil(rate * max([step_tokens, *(ref.num_tokens for ref in refs)]))


def check_step_fits(split: str, step: int, *, limit: int, max_bytes: int) -> None:
    """Refuses a limit that not even one step fits.

    Raises:
        UsageError: saying what a step takes, what is there, and what to do.
    """
    if step > limit:
        raise UsageError(
            f"--max-disk {show_size(max_bytes)} leaves {show_size(limit)} for the {split} split, and the samples of "
            f"one step take up to {show_size(step)}: raise --max-disk, or lower --batch-tokens"
        )


def cut_parts(steps: Sequence[set[int]], sizes: Mapping[int, int], *, limit: int) -> Iterator[range]:
    """Ranges of consecutive steps whose samples, each counted once, fit the limit.

    Args:
        steps: the samples of each; none exceeds the limit.
        sizes: bytes of each sample.
        limit: bytes of a part.
    """
    first, held, size = 0, set[int](), 0
    for number, step in enumerate(steps):
        more = sum(sizes[index] for index in step - held)
        if size + more > limit:
            yield range(first, number)
            first, held, size, more = number, set(), 0, sum(sizes[index] for index in step)
        held |= step
        size += more
    if steps:
        yield range(first, len(steps))


@contextmanager
def set_aside(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """The trainer's weights and optimizer state wait in the host's memory while the target has the GPU."""
    _move(model, optimizer, torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    yield
    _move(model, optimizer, device)


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    model.to(device)
    for state in optimizer.state.values():
        state.update({name: value.to(device) for name, value in state.items() if isinstance(value, torch.Tensor)})
