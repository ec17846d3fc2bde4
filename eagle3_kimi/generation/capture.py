"""Between the run loop and the feature store: a complete sample's hidden states, asked for, encoded, kept."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from eagle3_kimi.engines import Generation, GenerationRequest
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.errors import EngineError
from eagle3_kimi.generation.config import GenerationConfig
from eagle3_kimi.generation.rows import split_of
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.hidden_states.capturing_engine import CapturedGeneration, CapturingVllmEngine
from eagle3_kimi.hidden_states.encode import Captured, find_fault
from eagle3_kimi.hidden_states.one_pass import OnePassStore, read_sample
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.target import Target


class StateCapture:
    """The states of one run's samples. Use as a context manager, as `OnePassStore`.

    Args:
        capture: which states, where.
        config: the run's.
        target: the target model.
        preset: name of the protocol preset that reads its answers.
    """

    def __init__(self, capture: CaptureConfig, config: GenerationConfig, target: Target, preset: str) -> None:
        self._validation_fraction = config.validation_fraction
        self._store = OnePassStore(
            capture,
            target,
            dtype=config.options.dtype,
            temperature=config.sampling.temperature,
            protocol=preset,
            tensor_parallel_size=config.options.tensor_parallel_size,
        )
        self._missing: dict[str, Sample] = {}

    def open_engine(self, name: str, target: Target, options: EngineOptions) -> CapturingVllmEngine:
        """The engine that captures what the store needs; the configuration has refused any other `name`."""
        return CapturingVllmEngine(target, options, self._store.layer_ids)

    @property
    def num_missing(self) -> int:
        """Journaled samples whose states were asked for and have not come."""
        return len(self._missing)

    def request_missing(self, row: dict[str, Any]) -> GenerationRequest | None:
        """The prefill of a journaled sample that the store lacks; None where it holds it."""
        sample = self._read(row)
        if self._store.holds(sample):
            return None
        self._missing[sample.id] = sample
        return GenerationRequest(
            id=sample.id,
            prompt_token_ids=row["prompt_token_ids"],
            seed=0,
            known_output=row["output_token_ids"],
        )

    def take_missing(self, generation: Generation) -> bool:
        """Keeps the states that `request_missing` asked for; False: this is a new answer."""
        sample = self._missing.pop(generation.request_id, None)
        if sample is not None:
            self._store.add(sample, _fit_states(sample, generation))
        return sample is not None

    def check(self, row: dict[str, Any], generation: Generation) -> Captured:
        """A complete sample with its states; keeps nothing.

        Raises:
            DataError: the states are bad.
        """
        sample = self._read(row)
        return sample, _fit_states(sample, generation)

    def keep(self, captured: Captured) -> None:
        """Puts a journaled sample into the store."""
        self._store.add(*captured)

    def _read(self, row: dict[str, Any]) -> Sample:
        return read_sample(row, split_of(row["conversation_id"], self._validation_fraction))

    def __enter__(self) -> StateCapture:
        self._store.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.__exit__(kind, error, trace)


def _fit_states(sample: Sample, generation: Generation) -> CapturedStates:
    if not isinstance(generation, CapturedGeneration):
        raise EngineError(f"the engine gave no hidden states with the answer of {generation.request_id}")
    if fault := find_fault(sample, generation.states):
        raise fault
    return generation.states
