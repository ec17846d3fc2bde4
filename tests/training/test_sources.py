"""A store, a ring of parts and the target's own memory feed the trainer the same batches."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.extract import extract_hidden_states
from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.store import FeatureStore, check_store
from eagle3_kimi.target import Target, resolve_target
from eagle3_kimi.training.batches import deal, plan_epoch
from eagle3_kimi.training.config import LiveOptions, TrainConfig
from eagle3_kimi.training.online import OnlineFeatures
from eagle3_kimi.training.ring import RingFeatures, cut_parts
from eagle3_kimi.training.sources import FeatureSource
from eagle3_kimi.training.trainer import train_drafter
from tests.hidden_states.random_target import generate_rows, save_rows
from tests.hidden_states.test_share import DamagedSource, with_value
from tests.training.launching import ENVIRONMENT, ROOT, launch
from tests.training.runs import SETTINGS, assert_same_run

CAPTURE: dict[str, Any] = {
    "engine": "transformers",
    "aux_layer_ids": (1, 2, 3),
    "aux_dtype": "fp32",
    "targets": "state",
    "max_batched_tokens": 256,
    "contract_samples": 4,
}
RUN = {**SETTINGS, "draft_vocab_size": 200, "num_attention_heads": 4, "intermediate_size": 64}
LIMIT = "500kB"  # a sample takes about 120 kB, the validation split 125 kB in all


@pytest.fixture(scope="module")
def tiny(tiny_target: Path) -> Target:
    return resolve_target(tiny_target)


@pytest.fixture(scope="module")
def dataset(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_rows(generate_rows(tiny, 16, temperature=0.0), tmp_path_factory.mktemp("samples") / "greedy")


@pytest.fixture(scope="module")
def config(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return TrainConfig(**RUN, target=str(tiny.path), output=tmp_path_factory.mktemp("runs") / "stored")


@pytest.fixture(scope="module")
def stored(config: TrainConfig, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others must equal: extracted first, trained on afterwards."""
    store = tmp_path_factory.mktemp("stores") / "store"
    extract_hidden_states(ExtractConfig(dataset=dataset, target=config.target, output=store, **CAPTURE))
    train_drafter(replace(config, store=store))
    return config.output


def ring_options(dataset: Path, **changes: Any) -> LiveOptions:
    return LiveOptions(**{**CAPTURE, "dataset": dataset, "max_disk": LIMIT, **changes})


def assert_same_summary(output: Path, reference: Path, *, rel: float = 1e-4) -> None:
    ours, theirs = (json.loads((folder / "training.json").read_text()) for folder in (output, reference))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=rel)
    for name in ("steps", "supervised_tokens", "draft_vocab_coverage_by_span", "refused", "refused_validation"):
        assert ours[name] == theirs[name]


def test_a_ring_trains_what_a_store_does(
    config: TrainConfig, dataset: Path, stored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over more than one epoch, with evaluations in the middle, and nothing is left of the parts."""
    caplog.set_level(logging.INFO, logger="eagle3_kimi.training.ring")
    run = replace(config, output=tmp_path / "run", evaluate_every=2, num_workers=1)
    train_drafter(run, ring_options(dataset))
    assert_same_run(run.output, stored)
    assert_same_summary(run.output, stored)
    assert caplog.text.count("a part of the train split") > 3
    assert caplog.text.count("a part of the validation split: 2 samples") == 1  # it stays
    assert not list((run.output / "parts").iterdir())


def test_online_training_is_what_a_store_gives(
    config: TrainConfig, dataset: Path, stored: Path, tmp_path: Path
) -> None:
    run = replace(config, output=tmp_path / "run", num_workers=1)
    train_drafter(run, ring_options(dataset, max_disk=None, online=True))
    assert_same_run(run.output, stored)
    assert_same_summary(run.output, stored)
    assert not (run.output / "parts").exists()


def test_a_compact_ring_goes_on_online(config: TrainConfig, dataset: Path, tmp_path: Path) -> None:
    """Where the features are made does not belong to the run, so an interrupted one may go on another way."""
    compact = ring_options(dataset, aux_dtype="fp8", targets="topk", max_disk="1MB")
    whole = replace(config, output=tmp_path / "whole")
    train_drafter(whole, compact)
    shutil.copytree(whole.output, tmp_path / "run")
    (tmp_path / "run" / "training.json").unlink()
    for later in ("step-000006", "step-000009"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / later)
    train_drafter(replace(config, output=tmp_path / "run"), replace(compact, max_disk=None, online=True))
    assert_same_run(tmp_path / "run", whole.output)


def open_ring(config: TrainConfig, options: LiveOptions, target: Target, folder: Path) -> RingFeatures:
    assert options.dataset is not None
    extraction = Extraction(options, options.dataset, target, Ranks.join(1), max_length=config.max_length)
    return RingFeatures(extraction, folder, 500_000, max_length=config.max_length, step_tokens=config.batch_tokens)


def used_bytes(folder: Path) -> int:
    """On the disk, deleted files that are still open included."""
    kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    mapped = Path("/proc/self/maps").read_text().splitlines() if Path("/proc").is_dir() else []
    return kept + sum(_length(line) for line in mapped if str(folder) in line and line.endswith("(deleted)"))


def _length(line: str) -> int:
    first, last = (int(address, 16) for address in line.split()[0].split("-"))
    return last - first


def plan_steps(ring: FeatureSource, epochs: int = 2) -> list[list[list[int]]]:
    lengths = ring.train.lengths
    return [
        deal(batch, lengths, micro_batch_tokens=160, world_size=1)
        for epoch in range(epochs)
        for batch in plan_epoch(range(len(lengths)), lengths, batch_tokens=160, seed=0, epoch=epoch)
    ]


def test_a_ring_stays_within_its_limit(
    config: TrainConfig, tiny: Target, dataset: Path, stored: Path, tmp_path: Path
) -> None:
    """And gives the planned samples with the store's features, in the planned order, beside the validation split."""
    reference = FeatureStore(yaml.safe_load((stored / "config.yaml").read_text())["store"], split="train")
    with open_ring(config, ring_options(dataset), tiny, tmp_path / "parts") as ring:
        plan, came = plan_steps(ring), []
        held_out = [deal(range(2), ring.validation.lengths, micro_batch_tokens=160, world_size=1)]
        for part in ring.parts("train", plan, start=0, aside=contextlib.nullcontext):
            for kept in ring.parts("validation", held_out, start=0, aside=contextlib.nullcontext):
                assert kept.samples[0].split == "validation"
            assert 0 < used_bytes(tmp_path / "parts") <= 500_000
            for micro in (micro for step in part.micro_batches for micro in step):
                came.append([part.samples[index].id for index in micro])
                for sample in (part.samples[index] for index in micro):
                    expected = reference[reference.ids.index(sample.id)]
                    torch.testing.assert_close(
                        sample.aux_hidden_states, expected.aux_hidden_states, rtol=1e-3, atol=1e-3
                    )
                    assert torch.equal(sample.target_argmax, expected.target_argmax)
            del sample  # it has its shard open
    assert came == [[reference.ids[index] for index in micro] for step in plan for micro in step]
    assert not list((tmp_path / "parts").iterdir())


def test_of_a_part_that_is_not_whole_the_rest_is_extracted(
    config: TrainConfig, tiny: Target, dataset: Path, tmp_path: Path
) -> None:
    options, folder = ring_options(dataset, max_shard_bytes=1), tmp_path / "parts"
    ring = open_ring(config, options, tiny, folder)
    next(ring.parts("train", plan_steps(ring), start=0, aside=contextlib.nullcontext))
    (part,) = folder.iterdir()
    (part / "whole.json").unlink()  # as if it had been killed in the middle of a shard
    torn, *good = sorted(part.glob("features-*.safetensors"))
    torn.with_suffix(".json").unlink()
    torn.write_bytes(torn.read_bytes()[:100])
    written = {shard: shard.stat().st_mtime_ns for shard in good}
    with open_ring(config, options, tiny, folder) as ring:
        next(ring.parts("train", plan_steps(ring), start=0, aside=contextlib.nullcontext))
        assert list(folder.iterdir()) == [part]
        assert check_store(part).ok
        assert check_store(part).samples == len(written) + 1
        assert {shard: shard.stat().st_mtime_ns for shard in good} == written


def test_killed_and_resumed_equals_uninterrupted(
    config: TrainConfig, dataset: Path, stored: Path, tmp_path: Path
) -> None:
    run, options = replace(config, output=tmp_path / "run"), ring_options(dataset, max_shard_bytes=1)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**run.as_plain(), **options.as_plain()}))
    command = [sys.executable, str(ROOT / "train" / "train_drafter.py"), "--config", str(file)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while not (run.output / "checkpoints" / "step-000003").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list((run.output / "parts").glob("part-train-*"))
    train_drafter(run, options)
    assert_same_run(run.output, stored)


@pytest.mark.multiprocess
def test_two_processes_share_a_ring(config: TrainConfig, dataset: Path, stored: Path, tmp_path: Path) -> None:
    run = replace(config, output=tmp_path / "run", expected_world_size=2)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**run.as_plain(), **ring_options(dataset).as_plain()}))
    code, printed = launch("cpu_2.yaml", [], ["--config", str(file)])
    assert code == 0, printed
    assert json.loads((run.output / "training.json").read_text())["world_size"] == 2
    assert printed.count("a part of the train split") > 3
    assert_same_run(run.output, stored)
    assert_same_summary(run.output, stored)


@pytest.mark.vllm
@pytest.mark.multiprocess
@pytest.mark.parametrize("live", [{}, {"max_disk": None, "online": True}], ids=["ring", "online"])
def test_two_processes_train_on_one_copy_of_the_target(
    config: TrainConfig, dataset: Path, stored: Path, tmp_path: Path, live: dict[str, Any]
) -> None:
    """vLLM with tensor parallelism and DDP in the same two processes: the leader writes, or hands out, the states."""
    run = replace(config, output=tmp_path / "run", expected_world_size=2)
    options = ring_options(dataset, **live, engine="vllm", tensor_parallel_size=2)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**run.as_plain(), **options.as_plain()}))
    code, printed = launch("cpu_2.yaml", [], ["--config", str(file)])
    assert code == 0, printed
    assert_same_run(run.output, stored, loss_rtol=1e-3, atol=5e-3)  # nine steps on another engine's float32 states
    assert_same_summary(run.output, stored, rel=1e-3)


def test_parts_are_the_steps_whose_samples_fit() -> None:
    a, b, c, d, e, f, g = range(7)
    steps = [{a, b}, {c, d}, {e}, {b}, {f, g, a}]
    sizes = dict.fromkeys(range(7), 10)
    assert list(cut_parts(steps, sizes, limit=40)) == [range(0, 2), range(2, 4), range(4, 5)]
    assert list(cut_parts(steps, sizes, limit=50)) == [range(0, 4), range(4, 5)]  # b is there already
    assert list(cut_parts(steps * 3, sizes, limit=70)) == [range(0, 15)]
    assert list(cut_parts([], sizes, limit=70)) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda run, live: (run, replace(live, max_disk="100kB")), r"--max-disk 100 kB leaves 75 kB for the train split,"),
        (lambda run, live: (run, replace(live, max_disk="200kB")), r"one step take up to .* kB: raise --max-disk, or low"),
        (lambda run, live: (replace(run, store=run.output), replace(live, max_disk=None, online=True)), "leave out --st"),
        (lambda run, live: (run, LiveOptions()), r"expected --store DIR, or --dataset DIR with --max-disk SIZE or"),
    ],
    ids=["the validation too", "one step", "online and a store", "nothing"],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_the_target_is_loaded(
    config: TrainConfig,
    dataset: Path,
    tmp_path: Path,
    change: Callable[[TrainConfig, LiveOptions], tuple[TrainConfig, LiveOptions]],
    sentence: str,
) -> None:
    run, live = change(replace(config, output=tmp_path / "run"), ring_options(dataset))
    with pytest.raises(UsageError, match=sentence):
        train_drafter(run, live)
    assert not run.output.exists()


def test_options_that_contradict_each_other(dataset: Path) -> None:
    for options in ({"max_disk": None}, {"dataset": None}, {"dataset": None, "max_disk": None, "online": True}):
        with pytest.raises(UsageError, match="--dataset goes with --max-disk SIZE or --online"):
            ring_options(**{"dataset": dataset, **options})
    with pytest.raises(UsageError, match="aux_dtype, top_k have no effect on a store that is there"):
        LiveOptions(aux_dtype="bf16", top_k=8)
    with pytest.raises(UsageError, match="choose one"):
        ring_options(dataset, online=True)
    for size in ("500", "0GB", "five GB", "500 GiB"):
        with pytest.raises(UsageError, match=f"written like 500GB .* not '{size}'"):
            ring_options(dataset, max_disk=size)


def test_a_folder_that_is_a_store_is_no_ring(config: TrainConfig, dataset: Path, stored: Path, tmp_path: Path) -> None:
    store = Path(yaml.safe_load((stored / "config.yaml").read_text())["store"])
    with pytest.raises(UsageError, match="is a feature store: train on it without --max-disk"):
        train_drafter(replace(config, output=tmp_path / "run", store=store), ring_options(dataset))


@pytest.mark.parametrize("live", [{}, {"max_disk": None, "online": True}], ids=["ring", "online"])
def test_answers_of_nobody_fail_the_contract(
    config: TrainConfig, tiny: Target, tmp_path: Path, live: dict[str, Any]
) -> None:
    rows = generate_rows(tiny, 8, temperature=0.0)
    for row in rows:
        row["output_token_ids"] = row["output_token_ids"][::-1]
    run = replace(config, output=tmp_path / "run")
    with pytest.raises(DataError, match="failed the contract check"):
        train_drafter(run, ring_options(save_rows(rows, tmp_path / "rows"), **live))
    assert not list((run.output / "checkpoints").glob("step-*"))
    assert not list((run.output / "parts").glob("*/*"))


@pytest.mark.parametrize("online", [False, True], ids=["ring", "online"])
def test_a_sample_whose_states_are_bad_is_left_out_of_its_step(
    config: TrainConfig, tiny: Target, dataset: Path, tmp_path: Path, online: bool
) -> None:
    options = replace(ring_options(dataset), max_refused=0.4)
    extraction = Extraction(options, dataset, tiny, Ranks.join(1), max_length=config.max_length)
    extraction.open_share()  # starts the engine, which then goes wrong
    assert extraction._source is not None
    extraction._source = DamagedSource(extraction._source, {"sample-007": with_value(torch.nan)})
    sizes = {"max_length": config.max_length}
    source: FeatureSource = OnlineFeatures(extraction, **sizes)
    if not online:
        source = RingFeatures(extraction, tmp_path / "parts", 500_000, step_tokens=160, **sizes)
    with source:
        plan, came = plan_steps(source, epochs=1), []
        for part in source.parts("train", plan, start=0, aside=contextlib.nullcontext):
            came += [[part.samples[index].id for index in micro] for step in part.micro_batches for micro in step]
    ids = source.train.ids
    assert came == [[ids[i] for i in micro if ids[i] != "sample-007"] for step in plan for micro in step]
    assert sum(len(micro) for micro in came) == len(ids) - 1
