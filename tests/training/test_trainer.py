"""Whole runs: one process and two, interrupted and not, refused and reused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eagle3_kimi.drafter.vocab import VocabMap
from eagle3_kimi.errors import DataError, RunStopped, UsageError
from eagle3_kimi.hidden_states.store import FeatureStore
from eagle3_kimi.target import Target
from eagle3_kimi.training.batches import deal, plan_epoch, select_trainable
from eagle3_kimi.training.checkpoint import check_rate_continues
from eagle3_kimi.training.config import TrainConfig
from eagle3_kimi.training.exporting import export_checkpoint
from eagle3_kimi.training.setup import measure_coverage, open_draft_vocab
from eagle3_kimi.training.trainer import compute_learning_rate, train_drafter
from tests.training.launching import ENVIRONMENT, ROOT, launch
from tests.training.runs import assert_same_run, build_config, read_losses, write_run_file
from tests.training.toy import VOCAB, ToyTarget, write_toy_run


def test_a_run_writes_what_it_says(reference: Path) -> None:
    summary = json.loads((reference / "training.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["ttt_steps"]) == (9, 1, 3)
    assert summary["evaluated_on"] == "validation"
    assert summary["simulated_acceptance_length"] == pytest.approx(1 + sum(summary["acceptance"]))
    assert sorted(path.name for path in (reference / "checkpoints").iterdir()) == [
        "step-000003",
        "step-000006",
        "step-000009",
    ]
    losses = read_losses(reference)
    assert losses[-1] < losses[0]
    assert yaml.safe_load((reference / "config.yaml").read_text())["ttt_steps"] == 3


def test_four_micro_batches_equal_one(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    train_drafter(build_config(toy, tmp_path / "run", micro_batch_tokens=40, max_length=40))
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.multiprocess
def test_two_processes_equal_one_and_one_goes_on_from_them(
    toy: tuple[Target, Path], reference: Path, tmp_path: Path
) -> None:
    """Real gloo processes, with different numbers of supervised tokens on each."""
    config = build_config(toy, tmp_path / "run", expected_world_size=2)
    assert uneven_steps(config, world_size=2) > 0
    file = write_run_file(tmp_path, toy, output=config.output, expected_world_size=2)
    code, printed = launch("cpu_2.yaml", [], ["--config", str(file)])
    assert code == 0, printed
    assert json.loads((config.output / "training.json").read_text())["world_size"] == 2
    assert_same_run(config.output, reference)

    (config.output / "training.json").unlink()
    shutil.rmtree(config.output / "export")
    for later in ("step-000006", "step-000009"):
        shutil.rmtree(config.output / "checkpoints" / later)
    assert train_drafter(build_config(toy, config.output))["world_size"] == 1
    assert_same_run(config.output, reference)


def uneven_steps(config: TrainConfig, *, world_size: int) -> int:
    """Steps of the first epoch whose ranks have different numbers of supervised tokens."""
    store = FeatureStore(config.store, split="train")
    uneven = 0
    for batch in plan_first_epoch(config):
        parts = deal(batch, store.lengths, micro_batch_tokens=config.micro_batch_tokens, world_size=world_size)
        ranks = [[i for part in parts[rank::world_size] for i in part] for rank in range(world_size)]
        uneven += len({sum(len(store[i].target_argmax) for i in rank) for rank in ranks}) > 1
    return uneven


def test_killed_and_resumed_twice_equals_uninterrupted(
    toy: tuple[Target, Path], reference: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    file = write_run_file(tmp_path, toy, output=output)
    for enough in ("step-000003", "step-000006"):
        command = [sys.executable, str(ROOT / "train/train_drafter.py"), "--config", str(file)]
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while not (output / "checkpoints" / enough).exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (output / "training.json").exists()
    train_drafter(build_config(toy, output))
    assert_same_run(output, reference)


def test_a_finished_run_is_reused(toy: tuple[Target, Path], reference: Path) -> None:
    written = (reference / "training.json").stat().st_mtime_ns
    summary = train_drafter(build_config(toy, reference))
    assert summary["steps"] == 9
    assert (reference / "training.json").stat().st_mtime_ns == written


def test_a_target_without_think_markers_has_a_draft_vocabulary_without_them(
    toy: tuple[Target, Path], tmp_path: Path
) -> None:
    """The toy target has no tokenizer that could name any."""
    config = build_config(toy, tmp_path, draft_vocab_size=16, force_markers=False)
    train, validation = (FeatureStore(toy[1], split=split) for split in ("train", "validation"))
    vocab = open_draft_vocab(config, toy[0], train, validation)
    assert len(vocab.vocab_map.target_ids) == 16
    assert 0 < vocab.coverage["all"] <= 1


def test_the_trackers_curve_is_the_files(toy: tuple[Target, Path], tmp_path: Path) -> None:
    """Through Accelerate into TensorBoard's own files; a resumed run replaces the steps after its checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = build_config(toy, tmp_path / "run", tracker="tensorboard", max_steps=6, evaluate_every=3)
    train_drafter(config)
    (config.output / "training.json").unlink()
    shutil.rmtree(config.output / "checkpoints" / "step-000006")
    train_drafter(config)
    events = EventAccumulator(str(config.output / "logs" / "eagle3-kimi"))
    events.Reload()
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line["split"] == "train"}
    drawn = {event.step: event.value for event in events.Scalars("train/loss")}
    assert drawn == pytest.approx(losses, rel=1e-6)
    assert [event.step for event in events.Scalars("validation/spans/reasoning/acceptance/1")] == [3, 6]


def test_a_run_that_is_not_finite_stops_before_it_is_saved(toy: tuple[Target, Path], tmp_path: Path) -> None:
    clean = build_config(toy, tmp_path)
    third = plan_first_epoch(clean)[2][0]
    name = FeatureStore(toy[1], split="train").ids[third]
    run = write_toy_run(tmp_path / "toy", poisoned=name)
    config = build_config(run, tmp_path / "run", checkpoint_every=1, keep_checkpoints=100, log_every=100)
    with pytest.raises(RunStopped, match=rf"step 3: .*(nan|inf).*{name}"):
        train_drafter(config)
    assert sorted(path.name for path in (config.output / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert not (config.output / "export").exists()


def plan_first_epoch(config: TrainConfig) -> list[list[int]]:
    store = FeatureStore(config.store, split="train")
    indices, _ = select_trainable(store, config.max_length)
    return plan_epoch(indices, store.lengths, batch_tokens=config.batch_tokens, seed=config.seed, epoch=0)


def test_samples_that_are_too_long_are_counted_in_both_splits(
    toy: tuple[Target, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = {split: FeatureStore(toy[1], split=split).lengths for split in ("train", "validation")}
    summary = train_drafter(build_config(toy, tmp_path / "run", max_length=15, max_steps=1))
    assert summary["refused"]["too_long"] == sum(length > 15 for length in lengths["train"]) > 0
    assert summary["refused_validation"]["too_long"] == sum(length > 15 for length in lengths["validation"]) > 0
    assert "refused of the validation split" in caplog.text


def test_the_summary_says_what_the_vocabulary_allows(reference: Path, toy: tuple[Target, Path], tmp_path: Path) -> None:
    """With 12 of the 20 ids that occur, coverage and ceiling are those of counting by hand."""
    full = json.loads((reference / "training.json").read_text())
    assert full["draft_vocab_coverage"] == 1.0
    assert full["acceptance_ceiling"] == pytest.approx(1 + 3)
    assert set(full["spans"]) == set(full["draft_vocab_coverage_by_span"]) == {"reasoning", "answer", "marker"}

    target, vocab_map = toy[0], VocabMap(target_ids=torch.arange(12), vocab_size=VOCAB, fingerprint="")
    store = FeatureStore(toy[1], split="validation")
    vocab = measure_coverage(store, vocab_map, target.vocab_size)
    tokens = torch.cat([sample.token_ids[sample.num_prompt_tokens + 1 :] for sample in store])
    assert vocab["all"] == pytest.approx(float((tokens < 12).float().mean()))
    reasoning = [
        int(sample.token_ids[sample.num_prompt_tokens + i]) < 12
        for sample in store
        for i in range(1, (len(sample.token_ids) - sample.num_prompt_tokens) // 2)
    ]
    assert vocab["reasoning"] == pytest.approx(sum(reasoning) / len(reasoning))


def test_another_run_does_not_resume_here(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    shutil.copytree(reference / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(UsageError, match="belongs to a run with other data"):
        train_drafter(build_config(toy, tmp_path / "run", learning_rate=1e-3))


def test_a_checkpoint_exports_what_the_run_exported(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    """Without the run's store and settings, and the same from the whole file that FSDP saves."""
    step = tmp_path / "step-000009"
    shutil.copytree(reference / "checkpoints" / step.name, step)
    assert export_checkpoint(reference, tmp_path / "newest").name == step.name
    assert export_checkpoint(step, tmp_path / "one") == step
    torch.save(load_file(step / "model.safetensors"), step / "pytorch_model_fsdp.bin")
    (step / "model.safetensors").unlink()
    export_checkpoint(step, tmp_path / "whole", target=str(toy[0].path))
    for folder in ("newest", "one", "whole"):
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / folder / file).read_bytes() == (reference / "export" / file).read_bytes()
    export_checkpoint(step, tmp_path / "spec", format="speculators")
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "spec" / "model.safetensors")


def test_a_checkpoint_that_cannot_be_exported(toy: tuple[Target, Path], reference: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")
    other = ToyTarget(seed=1).save(tmp_path / "other")
    with pytest.raises(DataError, match="was trained for"):
        export_checkpoint(reference, tmp_path / "out", target=str(other.path))
    shutil.copytree(reference / "checkpoints" / "step-000009", tmp_path / "step-000009")
    (tmp_path / "step-000009" / "model.safetensors").unlink()
    with pytest.raises(DataError, match="FULL_STATE_DICT"):
        export_checkpoint(tmp_path, tmp_path / "out")
    (tmp_path / "step-000009" / "trainer_state.json").write_text('{"global_step": 9}')
    with pytest.raises(DataError, match="another trainer's checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")


def test_no_steps_export_the_untrained_drafter(toy: tuple[Target, Path], tmp_path: Path) -> None:
    summary = train_drafter(build_config(toy, tmp_path / "run", max_steps=0))
    assert (summary["steps"], summary["supervised_tokens"]) == (0, 0)
    assert (tmp_path / "run" / "export" / "config.json").is_file()


@pytest.mark.parametrize("contract", [{"passed": False, "agreement": 0.2}, None])
def test_unproven_states_are_refused(tmp_path: Path, contract: dict | None) -> None:
    target, store = write_toy_run(tmp_path / "toy", samples=3)
    manifest = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**manifest, "contract": contract}))
    with pytest.raises(DataError, match="contract"):
        train_drafter(build_config((target, store), tmp_path / "run"))


def test_a_wrong_launch_stops(toy: tuple[Target, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected 2 processes, 1 are running"):
        train_drafter(build_config(toy, tmp_path / "run", expected_world_size=2))
    with pytest.raises(UsageError, match="precision"):
        train_drafter(build_config(toy, tmp_path / "run", precision="bf16"))
    with pytest.raises(UsageError, match="max_length"):
        build_config(toy, tmp_path / "run", max_length=1000)


def test_the_rate_depends_on_the_step_alone(toy: tuple[Target, Path], tmp_path: Path) -> None:
    config = build_config(toy, tmp_path, learning_rate=1.0, warmup_ratio=0.1)
    assert [compute_learning_rate(step, 20, config) for step in (1, 2, 11, 20)] == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_a_rate_that_jumps_is_refused() -> None:
    check_rate_continues(3.1e-5, 3.1e-5, step=100)
    check_rate_continues(0.0, 0.0, step=100)
    with pytest.raises(UsageError, match=r"step 100 was taken with a learning rate of 3\.1e-05.* 1e-06"):
        check_rate_continues(3.1e-5, 1e-6, step=100)
