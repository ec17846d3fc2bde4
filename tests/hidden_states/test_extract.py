"""Extraction through the launched script: vLLM alone, tensor parallel and data parallel, against transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.extract import extract_hidden_states
from eagle3_kimi.hidden_states.quantize import QuantizedStates
from eagle3_kimi.hidden_states.samples import SampleRef, plan_shares
from eagle3_kimi.hidden_states.store import FeatureFormat, FeatureStore, check_store
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.target import Target
from tests.hidden_states.random_target import AUX_LAYER_IDS, save_random_target, save_rows

ROOT = Path(__file__).parents[2]


def launch(processes: int, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", str(ROOT / f"accelerate_configs/cpu_{processes}.yaml"),
        str(ROOT / "train/extract_hidden_states.py"), "--output", str(output), *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def options_for(target: Target, dataset: Path) -> list[str]:
    return [
        "--target", str(target.path), "--dataset", str(dataset), "--aux_layer_ids", str(list(AUX_LAYER_IDS)),
        "--aux_dtype", "fp32", "--targets", "state",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def config(random_target: Target, greedy_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> ExtractConfig:
    return ExtractConfig(
        dataset=greedy_dataset,
        target=str(random_target.path),
        output=tmp_path_factory.mktemp("stores") / "transformers",
        aux_layer_ids=AUX_LAYER_IDS,
        aux_dtype="fp32",
        targets="state",
        engine="transformers",
        max_batched_tokens=256,
    )


@pytest.fixture(scope="module")
def expected(config: ExtractConfig) -> FeatureStore:
    extract_hidden_states(config)
    return FeatureStore(config.output)


def assert_equal_stores(came: FeatureStore, expected: FeatureStore) -> None:
    """Equal to float tolerance: boundaries 1, 2, 3 at every position, boundary 4 at the supervised ones."""
    assert came.ids == expected.ids
    assert came.manifest.contract is not None
    assert came.manifest.contract["passed"]
    for one, other in zip(came, expected, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert (one.split, one.spans, one.num_prompt_tokens) == (other.split, other.spans, other.num_prompt_tokens)
        assert relative_error(one.aux_hidden_states, other.aux_hidden_states) < 1e-3
        assert relative_error(one.final_hidden_states, other.final_hidden_states) < 1e-3
        assert torch.equal(one.target_argmax, other.target_argmax)


def relative_error(came: Tensor, expected: Tensor) -> float:
    """The largest difference, against the size of the row it stands in: trained states are hundreds of times larger."""
    assert came.shape == expected.shape
    size = expected.square().mean(-1, keepdim=True).sqrt()
    return float(((came - expected).abs() / size).max()) if came.numel() else 0.0


def test_the_transformers_store_holds_the_data_set(expected: FeatureStore, greedy_rows: list[dict]) -> None:
    rows = {row["id"]: row for row in greedy_rows}
    assert expected.ids == sorted(rows)
    assert [s.id for s in expected if s.split == "validation"] == [r["id"] for r in greedy_rows[:2]]
    for sample in expected:
        row = rows[sample.id]
        assert sample.token_ids.tolist() == row["prompt_token_ids"] + row["output_token_ids"]
        # greedy: the target's choice at positions P..S-2 is the next output token
        assert sample.target_argmax.tolist() == row["output_token_ids"][1:]
    assert expected.manifest.protocol == "tiny-kimi"
    assert expected.manifest.contract["agreement"] == 1.0


@pytest.mark.vllm
def test_vllm_in_one_process_equals_transformers(
    random_target: Target, greedy_dataset: Path, expected: FeatureStore, tmp_path: Path
) -> None:
    options = options_for(random_target, greedy_dataset)
    result = launch(1, tmp_path / "store", *options, "--max_tokens_in_flight", "120")
    assert result.returncode == 0, result.stderr[-4000:]
    assert_equal_stores(FeatureStore(tmp_path / "store"), expected)


@pytest.mark.vllm
@pytest.mark.multiprocess
def test_two_processes_as_one_replica_equal_transformers(
    random_target: Target, greedy_dataset: Path, expected: FeatureStore, tmp_path: Path
) -> None:
    options = options_for(random_target, greedy_dataset)
    result = launch(2, tmp_path / "store", *options, "--tensor_parallel_size", "2", "--max_tokens_in_flight", "120")
    assert result.returncode == 0, result.stderr[-4000:]
    assert {file.name for file in (tmp_path / "store").glob("*.safetensors")} == {"features-r00-00000.safetensors"}
    assert_equal_stores(FeatureStore(tmp_path / "store"), expected)


@pytest.mark.vllm
@pytest.mark.multiprocess
def test_two_processes_share_the_head(
    random_target: Target, greedy_dataset: Path, expected: FeatureStore, tmp_path: Path
) -> None:
    """Each finds the best of its half of the vocabulary; the first batch is checked before the others come."""
    result = launch(
        2, tmp_path / "store",
        "--target", str(random_target.path), "--dataset", str(greedy_dataset),
        "--aux_layer_ids", str(list(AUX_LAYER_IDS)), "--top_k", "32", "--tensor_parallel_size", "2",
        "--contract_samples", "3",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    assert_kept(FeatureStore(tmp_path / "store"), expected, random_target)


@pytest.mark.vllm
@pytest.mark.multiprocess
def test_two_replicas_share_the_data(
    random_target: Target, greedy_dataset: Path, expected: FeatureStore, tmp_path: Path
) -> None:
    result = launch(2, tmp_path / "store", *options_for(random_target, greedy_dataset))
    assert result.returncode == 0, result.stderr[-4000:]
    stems = {file.stem for file in (tmp_path / "store").glob("*.safetensors")}
    assert stems == {"features-r00-00000", "features-r01-00000"}
    assert_equal_stores(FeatureStore(tmp_path / "store"), expected)


def test_a_store_is_resumed_and_extended(
    config: ExtractConfig, expected: FeatureStore, greedy_rows: list[dict], tmp_path: Path
) -> None:
    part = replace(config, dataset=save_rows(greedy_rows[:6], tmp_path / "part"), output=tmp_path / "store")
    assert extract_hidden_states(part).samples == 6
    whole = replace(config, output=tmp_path / "store")
    summary = extract_hidden_states(whole)
    assert (summary.samples, summary.skipped) == (8, 6)
    again = extract_hidden_states(whole)
    assert (again.samples, again.skipped) == (0, 14)
    store = FeatureStore(tmp_path / "store")
    assert_equal_stores(store, expected)
    assert store.manifest.dataset_fingerprint == expected.manifest.dataset_fingerprint
    assert check_store(tmp_path / "store").ok


def test_a_store_of_other_tokens_or_another_target_is_refused(
    config: ExtractConfig, expected: FeatureStore, greedy_rows: list[dict], tmp_path: Path
) -> None:
    changed = [{**greedy_rows[0], "output_token_ids": greedy_rows[0]["output_token_ids"][::-1]}, *greedy_rows[1:]]
    with pytest.raises(DataError, match="another data set"):
        extract_hidden_states(replace(config, dataset=save_rows(changed, tmp_path / "changed")))
    other = save_random_target(tmp_path / "other", seed=9)
    with pytest.raises(DataError, match="mixed store"):
        extract_hidden_states(replace(config, target=str(other.path)))
    assert FeatureStore(config.output).fingerprint == expected.fingerprint


def test_text_that_was_tokenised_again_is_refused(
    config: ExtractConfig, greedy_rows: list[dict], tmp_path: Path
) -> None:
    rows = [{**row, "token_exact": index != 3} for index, row in enumerate(greedy_rows)]
    with pytest.raises(DataError, match="split train, row 1: token_exact is false"):  # 2 rows are validation
        extract_hidden_states(replace(config, dataset=save_rows(rows, tmp_path / "again"), output=tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_answers_of_another_target_fail_the_contract_and_nothing_is_stored(
    config: ExtractConfig, tmp_path: Path
) -> None:
    other = save_random_target(tmp_path / "other", seed=9)
    with pytest.raises(DataError, match="wrong revision"):
        extract_hidden_states(replace(config, target=str(other.path), output=tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_wrong_options_are_refused(config: ExtractConfig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="multiple of 2 processes"):
        extract_hidden_states(replace(config, engine="vllm", tensor_parallel_size=2))
    with pytest.raises(UsageError, match="not a data set"):
        extract_hidden_states(replace(config, dataset=tmp_path))
    with pytest.raises(UsageError, match="embedding"):
        extract_hidden_states(replace(config, aux_layer_ids=(0, 1, 2)))
    with pytest.raises(UsageError, match="engine"):
        replace(config, engine="sglang")


def test_shares_are_disjoint_complete_and_even() -> None:
    refs = [SampleRef(f"{n}", "train", n, 10 + 37 * n % 91, "", 1, 0, 0) for n in range(101)]
    shares = plan_shares(refs, 4, window=20)
    assert sorted(ref.id for share in shares for ref in share) == sorted(ref.id for ref in refs)
    tokens = [sum(ref.num_tokens for ref in share) for share in shares]
    assert max(tokens) < 1.15 * min(tokens)
    by_length = sorted((ref.num_tokens for ref in refs[:20]), reverse=True)
    assert [ref.num_tokens for ref in shares[0][:5]] == [by_length[n] for n in (0, 7, 8, 15, 16)]


def assert_kept(store: FeatureStore, expected: FeatureStore, target: Target) -> None:
    """In the default format with 32 tokens: what the uncompressed one holds."""
    assert store.ids == expected.ids
    assert store.manifest.format == FeatureFormat(top_k=32)
    head = TargetHead(target, dtype=torch.float32)
    for came, full in zip(store, expected, strict=True):
        assert isinstance(came.aux_hidden_states, QuantizedStates)
        aux = came.aux_hidden_states.decode()
        error = (aux - full.aux_hidden_states).norm() / full.aux_hidden_states.norm()
        assert float(error) < 0.03
        probabilities = head.logits(full.final_hidden_states).softmax(-1)
        kept, ids = probabilities.topk(32)
        assert torch.equal(came.target_argmax, full.target_argmax)
        assert torch.equal(came.top_targets.ids[:, :4].long(), ids[:, :4])
        torch.testing.assert_close(came.top_targets.log_probs.float().exp(), kept, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(came.top_targets.tail_mass, 1 - kept.sum(-1), rtol=1e-3, atol=1e-5)


def test_the_default_format_keeps_what_was_captured(
    config: ExtractConfig, expected: FeatureStore, random_target: Target, tmp_path: Path
) -> None:
    compact = replace(config, output=tmp_path / "compact", aux_dtype="fp8", targets="topk", top_k=32)
    extract_hidden_states(compact)
    assert_kept(FeatureStore(compact.output), expected, random_target)
    for other in ({"aux_dtype": "bf16"}, {"targets": "state"}, {"top_k": 64}):
        with pytest.raises(DataError, match="format aux fp8 with 16 outliers, targets top 32 against aux"):
            extract_hidden_states(replace(compact, dataset=config.dataset, **other))
