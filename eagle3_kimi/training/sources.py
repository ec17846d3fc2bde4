"""Where the trainer's features come from. Whatever the source, the batches are the same:

plan of all steps ──► parts ──► this rank's micro-batches
                      stored: one part, all steps, from a feature store
                      ring:   the steps whose samples fit a limit: extracted, trained on, deleted
                      online: one step, from the target's memory to the trainer's
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.hidden_states.store import FeatureStore
from eagle3_kimi.target import Target

MicroBatchPlan = list[list[int]]
"""The micro-batches of one global batch, over all ranks: indices of a split's samples. Rank r takes r, r + world..."""


class Split(Protocol):
    """What steps are planned from: the samples of a split, sorted by id. A `FeatureStore` is one."""

    manifest: StoreManifest
    ids: list[str]
    lengths: list[int]
    prompt_lengths: list[int]

    @property
    def fingerprint(self) -> str:
        """Of the data."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample | FeatureSample: ...


class Readable(Protocol):
    """Features by index."""

    def __getitem__(self, i: int) -> FeatureSample: ...


@dataclass(frozen=True)
class Part:
    """Features of some consecutive global batches."""

    samples: Readable
    micro_batches: list[list[list[int]]]
    """This rank's, of each global batch, as indices of `samples`. A sample whose states were refused is left out."""


Aside = Callable[[], AbstractContextManager[None]]
"""Opens a stretch of time in which the trainer leaves the GPUs to the target."""


class FeatureSource(Protocol):
    """A context manager, so that an engine is stopped and what nobody needs any more is deleted."""

    on_disk: bool
    """Worker processes may read ahead."""

    @property
    def train(self) -> Split:
        """What is trained on."""
        ...

    @property
    def validation(self) -> Split:
        """What is held out; may be empty."""
        ...

    def parts(self, split: str, steps: Sequence[MicroBatchPlan], *, start: int, aside: Aside) -> Iterator[Part]:
        """The parts of a split's global batches, from number `start` on. Every rank asks for the same."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StoredFeatures:
    """A feature store that was made before.

    Raises:
        DataError: the store is not proven, or not the target's.
    """

    on_disk = True

    def __init__(self, path: Path, target: Target, ranks: Ranks) -> None:
        self._stores = {name: FeatureStore(path, split=name) for name in ("train", "validation")}
        self.train, self.validation = self._stores.values()
        self._ranks = ranks
        check_manifest(self.train.manifest, target, path)

    def parts(self, split: str, steps: Sequence[MicroBatchPlan], *, start: int, aside: Aside) -> Iterator[Part]:
        """One."""
        own = [step[self._ranks.rank :: self._ranks.world_size] for step in steps[start:]]
        yield Part(self._stores[split], own)

    def __enter__(self) -> StoredFeatures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self._stores.values():
            store.close()


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
