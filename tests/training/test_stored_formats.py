"""Training reads every format of the store, and a compact one trains like the full one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3_kimi.drafter.vocab import build_vocab_map
from eagle3_kimi.hidden_states.formats import FeatureFormat
from eagle3_kimi.hidden_states.quantize import quantize
from eagle3_kimi.hidden_states.store import FeatureSample, FeatureStore, FeatureStoreWriter
from eagle3_kimi.hidden_states.topk import find_best
from eagle3_kimi.training.batches import MicroBatches, pack
from eagle3_kimi.training.config import TrainConfig
from eagle3_kimi.training.metrics import Counts
from eagle3_kimi.training.setup import build_training_module
from eagle3_kimi.training.trainer import train_drafter
from eagle3_kimi.training.ttt import TrainingTimeTest
from tests.training.toy import AUX, HIDDEN, VOCAB, ToyTarget, toy_manifest, write_toy_run

STEPS, TOY = 3, ToyTarget()
FULL = FeatureFormat(aux_dtype="fp32", targets="state")
FORMATS = [
    FeatureFormat(aux_dtype="fp32", top_k=VOCAB),
    FeatureFormat(aux_dtype="bf16", targets="state"),
    FeatureFormat(aux_dtype="fp8", targets="state", num_outliers=4),
    FeatureFormat(aux_dtype="bf16", top_k=8),
    FeatureFormat(num_outliers=4, top_k=8),
]


def encode(sample: FeatureSample, store_format: FeatureFormat) -> FeatureSample:
    """A full sample in another format."""
    aux, final = sample.aux_hidden_states, sample.final_hidden_states
    assert isinstance(aux, torch.Tensor)
    assert final is not None
    dtype = getattr(torch, store_format.state_dtype)
    if store_format.aux_dtype == "fp8":
        stored_aux = quantize(aux, num_layers=len(AUX), num_outliers=store_format.num_outliers)
        sample = replace(sample, aux_hidden_states=stored_aux)
    else:
        sample = replace(sample, aux_hidden_states=aux.to(dtype))
    if store_format.targets == "state":
        return replace(sample, final_hidden_states=final.to(dtype))
    top = find_best(TOY.logits(final), store_format.top_k).among_all()
    return replace(sample, final_hidden_states=None, top_targets=top, target_argmax=top.choice.to(torch.int64))


def rewrite(source: Path, output: Path, store_format: FeatureFormat) -> Path:
    store = FeatureStore(source)
    with FeatureStoreWriter(output, replace(store.manifest, format=store_format)) as writer:
        for sample in store:
            writer.add(encode(sample, store_format))
    return output


@pytest.fixture
def module(tmp_path: Path) -> TrainingTimeTest:
    config = TrainConfig(store=tmp_path, target="", output=tmp_path, ttt_steps=STEPS, head_dim=8)
    counts = torch.tensor([1] * 16 + [0] * (VOCAB - 16))
    target = TOY.save(tmp_path / "target")
    vocab_map = build_vocab_map(counts, draft_vocab_size=16)
    sizes = torch.ones(len(AUX) * HIDDEN)
    return build_training_module(config, target, vocab_map, toy_manifest(target), channel_sizes=sizes)


@pytest.mark.parametrize("store_format", FORMATS, ids=str)
def test_counts_and_gradients_are_close_to_the_full_format(
    module: TrainingTimeTest, store_format: FeatureFormat
) -> None:
    full = [TOY.sample(i, prompt=2 + i, output=14) for i in range(5)]
    results = []
    for samples in (full, [encode(sample, store_format) for sample in full]):
        module.zero_grad()
        batch = pack(samples, STEPS, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN).to("cpu")
        loss, counts = module(batch)
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        results.append((Counts.unpack(counts), gradient))
    (expected, expected_gradient), (came, gradient) = results
    assert came.supervised_tokens == expected.supervised_tokens
    assert came.total.chains == expected.total.chains
    assert float(torch.cosine_similarity(gradient, expected_gradient, dim=0)) > 0.99
    if store_format.aux_dtype == "fp32":  # only the half-precision log-probabilities differ
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-2, atol=1e-3)
        assert came.total.hits == expected.total.hits


def test_an_empty_batch_trains_nothing(module: TrainingTimeTest) -> None:
    batch = pack([], STEPS, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN).to("cpu")
    loss, counts = module(batch)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert Counts.unpack(counts).supervised_tokens == 0.0


def test_a_run_on_the_default_format_learns_what_a_full_one_does(tmp_path: Path) -> None:
    target, full = write_toy_run(tmp_path)
    compact = rewrite(full, tmp_path / "compact", FeatureFormat(num_outliers=4, top_k=8))
    lengths = []
    for store in (full, compact):
        summary = train_drafter(
            TrainConfig(
                store=store, target=str(target.path), output=tmp_path / f"run-{store.name}", ttt_steps=STEPS,
                head_dim=8, epochs=20, batch_tokens=128, micro_batch_tokens=64, max_length=64, learning_rate=5e-3,
            )
        )  # fmt: skip
        lengths.append(summary["simulated_acceptance_length"])
    assert lengths[0] > 2.0
    assert lengths[1] == pytest.approx(lengths[0], rel=0.05)


def test_readers_in_worker_processes_see_the_same(tmp_path: Path) -> None:
    _, full = write_toy_run(tmp_path, samples=6)
    store = FeatureStore(rewrite(full, tmp_path / "compact", FeatureFormat(num_outliers=4, top_k=8)))
    batches = MicroBatches(store, [[0, 1], [2, 3]], STEPS, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN)
    loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=1)
    for came, expected in zip(loader, batches, strict=True):
        assert torch.equal(came.to("cpu").aux_hidden_states, expected.to("cpu").aux_hidden_states)
        assert torch.equal(came.top_targets.ids, expected.top_targets.ids)
