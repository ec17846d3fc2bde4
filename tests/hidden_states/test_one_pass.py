"""The store of a generation run, on states that transformers captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3_kimi.errors import DataError, RunStopped, UsageError
from eagle3_kimi.hidden_states.capture import CaptureRequest
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.hidden_states.encode import find_fault
from eagle3_kimi.hidden_states.one_pass import OnePassStore, read_sample
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.hidden_states.store import FeatureFormat, FeatureStore, StoreManifest
from eagle3_kimi.hidden_states.transformers_source import TransformersSource
from eagle3_kimi.target import Target
from tests.hidden_states.random_target import AUX_LAYER_IDS, save_random_target

Captured = list[tuple[Sample, CapturedStates]]


@pytest.fixture(scope="module")
def captured(random_target: Target, greedy_rows: list[dict]) -> Captured:
    samples = {row["id"]: read_sample(row, "train") for row in greedy_rows}
    source = TransformersSource(random_target, (1, 2, 3, 4), dtype="float32")
    requests = [CaptureRequest(name, tuple(sample.token_ids.tolist())) for name, sample in samples.items()]
    return [(samples[states.id], states) for states in source.capture(requests)]


def open_store(target: Target, path: Path, **options: object) -> OnePassStore:
    config = CaptureConfig(
        store=path,
        aux_layer_ids=AUX_LAYER_IDS,
        format=FeatureFormat(aux_dtype="fp32", targets="state"),
        max_shard_bytes=200_000,
        **options,  # type: ignore[arg-type]
    )
    return OnePassStore(config, target, dtype="float32", temperature=0.0, protocol="tiny-kimi")


def fill(store: OnePassStore, captured: Captured) -> None:
    with store:
        for sample, states in captured:
            if not store.holds(sample):
                store.add(sample, states)


def test_nothing_is_written_before_the_contract_and_after_an_error_the_rest_can_follow(
    random_target: Target, captured: Captured, tmp_path: Path
) -> None:
    path = tmp_path / "store"

    def fill_and_stop() -> None:
        with open_store(random_target, path, contract_samples=4) as store:
            for number, (sample, states) in enumerate(captured[:10]):
                store.add(sample, states)
                assert path.exists() == (number >= 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_and_stop()
    assert len(FeatureStore(path)) == 4  # the others waited to be encoded; the journal has them
    fill(open_store(random_target, path), captured)
    whole = FeatureStore(path)
    assert whole.ids == sorted(sample.id for sample, _ in captured)
    assert whole.manifest.contract is not None
    assert whole.manifest.contract["passed"]


def test_fewer_samples_than_the_contract_wants_are_checked_at_the_end(
    random_target: Target, captured: Captured, tmp_path: Path
) -> None:
    fill(open_store(random_target, tmp_path / "store"), captured[:2])
    assert StoreManifest.load(tmp_path / "store").contract["samples"] == 2


def test_states_of_other_layers_fail_the_contract_and_leave_no_store(
    random_target: Target, captured: Captured, tmp_path: Path
) -> None:
    shifted = [
        (sample, replace(states, hidden_states=states.hidden_states.roll(1, dims=1))) for sample, states in captured
    ]
    with pytest.raises(DataError, match="Nothing was stored"):
        fill(open_store(random_target, tmp_path / "store"), shifted)
    assert not (tmp_path / "store").exists()


def test_a_later_fault_marks_the_store(random_target: Target, captured: Captured, tmp_path: Path) -> None:
    store = open_store(random_target, tmp_path / "store", contract_samples=2, contract_every=4)
    late = [
        (sample, replace(states, hidden_states=states.hidden_states.roll(1, dims=0)) if number >= 8 else states)
        for number, (sample, states) in enumerate(captured)
    ]
    with pytest.raises(RunStopped, match="after 8 good samples"):
        fill(store, late)
    assert not StoreManifest.load(tmp_path / "store").contract["passed"]
    with pytest.raises(DataError, match="nothing is added to it"):
        open_store(random_target, tmp_path / "store")


@pytest.mark.parametrize("fault", ["nan", "short", "other tokens"])
def test_states_that_are_not_the_samples_are_found(captured: Captured, fault: str) -> None:
    sample, states = captured[0]
    bad = {
        "nan": replace(states, hidden_states=torch.full_like(states.hidden_states, float("nan"))),
        "short": replace(states, hidden_states=states.hidden_states[:-1]),
        "other tokens": replace(states, token_ids=states.token_ids.flip(0)),
    }
    assert find_fault(sample, states) is None
    assert sample.id in str(find_fault(sample, bad[fault]))


def test_a_store_of_other_samples_is_refused(random_target: Target, captured: Captured, tmp_path: Path) -> None:
    path = tmp_path / "store"
    fill(open_store(random_target, path), captured)
    with pytest.raises(DataError, match="holds 11 samples that are not of these prompts"):
        fill(open_store(random_target, path), captured[:3])
    sample, _ = captured[0]
    with pytest.raises(DataError, match="with other tokens or in another split"):
        open_store(random_target, path).holds(replace(sample, token_ids=sample.token_ids.flip(0)))
    with pytest.raises(DataError, match="mixed store"):
        open_store(save_random_target(tmp_path / "other", seed=9), path)


def test_what_cannot_be_captured_is_refused_before_anything_starts(random_target: Target, tmp_path: Path) -> None:
    def open_with(dtype: str, *layer_ids: int) -> OnePassStore:
        config = CaptureConfig(store=tmp_path, aux_layer_ids=layer_ids)
        return OnePassStore(config, random_target, dtype=dtype, temperature=0.0, protocol="tiny-kimi")

    assert open_with("auto", 2, 3).layer_ids == (1, 2, 3, 4)
    with pytest.raises(UsageError, match="embedding"):
        open_with("float32", 0, 1, 2)
    with pytest.raises(UsageError, match="float16 overflows"):
        open_with("float16", 1, 2, 3)
