"""Training from the target's memory: each step's states are computed when the step is due, and nothing is kept.

Every group of ranks that share a copy of the target computes what its own ranks train on. Only its leader has the
states, so it hands them out:

    step ──► micro-batches of all ranks ──► those of the group ──► leader's engine ──► each rank its own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.samples import plan_shares
from eagle3_kimi.hidden_states.share import ShareRun
from eagle3_kimi.training.live import LiveSplit
from eagle3_kimi.training.sources import Aside, MicroBatchPlan, Part


class OnlineFeatures:
    """Features from the engine's memory to the trainer's.

    Args:
        extraction: computes them.
        max_length: longer samples are not trained on.
    """

    on_disk = False

    def __init__(self, extraction: Extraction, *, max_length: int) -> None:
        self._extraction, self._ranks = extraction, extraction.ranks
        self._splits = {name: LiveSplit(extraction, name) for name in ("train", "validation")}
        self.train, self.validation = self._splits.values()
        self._usable = [ref for ref in extraction.refs if ref.num_tokens <= max_length]
        self._share: ShareRun | None = None

    def parts(self, split: str, steps: Sequence[MicroBatchPlan], *, start: int, aside: Aside) -> Iterator[Part]:
        """One a step; the trainer stays where it is.

        Raises:
            DataError: the first samples' states fail the contract.
            RunStopped: a later sample's do, or too many samples were refused.
        """
        for step in steps[start:]:
            yield self._compute(self._share or self._open(), self._splits[split], step)

    def _open(self) -> ShareRun:
        """Starts the engine, and checks the contract on samples that are not trained on yet."""
        self._share = self._extraction.open_share()
        count = self._extraction.options.contract_samples * self._ranks.num_groups
        shares = plan_shares(self._usable[:count], self._ranks.num_groups, window=count)
        for _ in self._share.compute(shares[self._ranks.group]):
            pass
        return self._share

    def _compute(self, share: ShareRun, split: LiveSplit, step: MicroBatchPlan) -> Part:
        size, world = self._ranks.tensor_parallel_size, self._ranks.world_size
        first = self._ranks.group * size
        wanted = [[index for micro in step[rank::world] for index in micro] for rank in range(first, first + size)]
        asked = sorted(set().union(*wanted), key=lambda index: (-split.lengths[index], index))
        places = {split.ids[index]: index for index in asked}
        came = {places[features.id]: features for features in share.compute([split.refs[index] for index in asked])}
        handed: list[dict[int, FeatureSample]] | None = None
        if self._ranks.is_leader:
            handed = [{index: came[index] for index in rank if index in came} for rank in wanted]
        own = self._ranks.scatter_in_group(handed)
        micro_batches = [[index for index in micro if index in own] for micro in step[self._ranks.rank :: world]]
        return Part(own, [micro_batches])

    def __enter__(self) -> OnlineFeatures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._extraction.close()
