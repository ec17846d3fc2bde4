"""Samples encoded together, in a thread: the same as alone, in order, and no more waiting than was allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.capture import CaptureRequest
from eagle3_kimi.hidden_states.encode import FeatureEncoder
from eagle3_kimi.hidden_states.encoder_thread import Captured, Encoded, EncoderThread
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.formats import FeatureFormat
from eagle3_kimi.hidden_states.manifest import StoreManifest
from eagle3_kimi.hidden_states.one_pass import read_sample
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.transformers_source import TransformersSource
from eagle3_kimi.target import Target
from tests.hidden_states.random_target import AUX_LAYER_IDS

LAYER_IDS = (1, 2, 3, 4)
FORMATS = {
    "fp8 and topk": FeatureFormat(),
    "fp32 and state": FeatureFormat(aux_dtype="fp32", targets="state"),
}


@pytest.fixture(scope="module")
def captured(random_target: Target, greedy_rows: list[dict]) -> list[Captured]:
    samples = {row["id"]: read_sample(row, "train") for row in greedy_rows}
    source = TransformersSource(random_target, LAYER_IDS, dtype="float32")
    requests = [CaptureRequest(name, tuple(sample.token_ids.tolist())) for name, sample in samples.items()]
    return [(samples[states.id], states) for states in source.capture(requests)]


def open_encoder(target: Target, store_format: FeatureFormat) -> FeatureEncoder:
    manifest = StoreManifest.describe(
        target,
        dtype="float32",
        aux_layer_ids=AUX_LAYER_IDS,
        format=store_format,
        dataset_fingerprint="",
        protocol="tiny-kimi",
    )
    return FeatureEncoder(manifest, TargetHead(target, dtype=torch.float32), LAYER_IDS)


@pytest.mark.parametrize("name", FORMATS)
def test_together_gives_what_each_gives_alone(random_target: Target, captured: list[Captured], name: str) -> None:
    encoder = open_encoder(random_target, FORMATS[name])
    together = encoder.encode(captured)
    assert len(together) == len(captured)
    for (one, _), pair in zip(together, captured, strict=True):
        ((alone, _),) = encoder.encode([pair])
        assert isinstance(one, FeatureSample)
        assert isinstance(alone, FeatureSample)
        assert one.index_entry() == alone.index_entry()
        for tensor, expected in zip(one.to_tensors().values(), alone.to_tensors().values(), strict=True):
            torch.testing.assert_close(tensor.float(), expected.float(), rtol=0, atol=1e-3)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # nothing of its neighbours stays with it


def test_a_bad_one_does_not_touch_its_neighbours(random_target: Target, captured: list[Captured]) -> None:
    encoder = open_encoder(random_target, FORMATS["fp8 and topk"])
    good = [features for features, _ in encoder.encode(captured[:3])]
    sample, states = captured[1]
    assert states.hidden_states is not None
    with_one_nan, other_ids, unknown_id = (
        states.hidden_states.clone(),
        states.token_ids.clone(),
        sample.token_ids.clone(),
    )
    with_one_nan[1, 0, 0] = torch.nan
    other_ids[2] += 1
    unknown_id[-1] = random_target.vocab_size  # no input, so the engine never sees it
    for bad in (
        (sample, replace(states, hidden_states=states.hidden_states.clone().fill_(torch.inf))),
        (sample, replace(states, hidden_states=with_one_nan)),
        (sample, replace(states, hidden_states=states.hidden_states[:-1])),
        (sample, replace(states, hidden_states=None)),
        (sample, replace(states, token_ids=other_ids)),
        (replace(sample, token_ids=unknown_id), states),
    ):
        encoded = encoder.encode([captured[0], bad, captured[2]])
        first, fault, last = (what for what, _ in encoded)
        assert isinstance(fault, DataError)
        assert sample.id in str(fault)
        for one, expected in ((first, good[0]), (last, good[2])):
            assert isinstance(one, FeatureSample)
            assert isinstance(expected, FeatureSample)
            torch.testing.assert_close(one.top_targets.tail_mass, expected.top_targets.tail_mass)


def test_what_only_the_format_cannot_hold_is_refused_alone(random_target: Target, captured: list[Captured]) -> None:
    encoder = open_encoder(random_target, FeatureFormat(aux_dtype="bf16", targets="state"))
    sample, states = captured[1]
    assert states.hidden_states is not None
    large = states.hidden_states.clone()
    large[0, 1, 0] = torch.finfo(torch.float32).max  # bf16 rounds it to infinity
    encoded = encoder.encode([captured[0], (sample, replace(states, hidden_states=large)), captured[2]])
    first, fault, last = (what for what, _ in encoded)
    assert isinstance(first, FeatureSample)
    assert isinstance(last, FeatureSample)
    assert isinstance(fault, DataError)
    assert f"{sample.id}: aux_hidden_states holds NaN or infinite" in str(fault)


def test_the_thread_keeps_the_order_and_bounds_what_waits(random_target: Target, captured: list[Captured]) -> None:
    encoder = open_encoder(random_target, FORMATS["fp8 and topk"])
    many = [
        (replace(sample, id=f"{turn}-{sample.id}"), replace(states, id=f"{turn}-{sample.id}"))
        for turn in range(8)
        for sample, states in captured
    ]
    taken: list[Encoded] = []
    most = 0
    with EncoderThread(encoder, most_tokens=1024) as thread:
        for number, (sample, states) in enumerate(many, start=1):
            thread.put(sample, states)
            taken.extend(thread.take())
            most = max(most, sum(len(states.token_ids) for _, states in many[len(taken) : number]))
        assert taken
        taken.extend(thread.drain())
    assert most < 3 * 512 + max(len(states.token_ids) for _, states in captured)
    assert [features.id for features, _ in taken] == [sample.id for sample, _ in many]
    assert [kept for _, kept in taken] == many
