"""States captured while generating, with the real engine on the tiny target: one engine for all but the kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from eagle3_kimi.builders.loading import save_whole

import eagle3_kimi
from eagle3_kimi.engines import SamplingOptions
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.errors import DataError
from eagle3_kimi.generation import GenerationConfig, GenerationRun, RunReport
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.hidden_states.capturing_engine import CapturedGeneration, CapturingVllmEngine
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.extract import extract_hidden_states
from eagle3_kimi.hidden_states.store import FeatureFormat, FeatureStore, check_store
from eagle3_kimi.prompts import load_conversations
from eagle3_kimi.target import resolve_target
from eagle3_kimi.tiny.problems import generate_problems
from tests.hidden_states.test_extract import assert_equal_stores

pytestmark = pytest.mark.vllm

AUX_LAYER_IDS = (1, 2, 3)
EXACT = FeatureFormat(aux_dtype="fp32", targets="state")
MAX_MODEL_LEN = 160


def write_prompts(path: Path, count: int) -> Path:
    """Problems, some with a tool and a second turn, and one that leaves no room for its answer."""
    rows = [{"messages": p.messages, "tools": p.tools} for p in generate_problems(count, seed=5)]
    rows.insert(3, {"messages": [{"role": "user", "content": "Sort these numbers: " + "7 " * 60}], "tools": []})
    path.write_text("".join(json.dumps({"id": f"c{i}", **row}) + "\n" for i, row in enumerate(rows)))
    return path


class OpenEngine:
    """A capturing engine that stays open when a run closes it, and notes what it gave."""

    def __init__(self, engine: CapturingVllmEngine) -> None:
        self._engine, self.info = engine, engine.info
        self.given: list[Any] = []

    def generate(self, *arguments: Any) -> Iterator[Any]:
        for generation in self._engine.generate(*arguments):
            self.given.append(generation)
            yield generation

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> Iterator[OpenEngine]:
    options = EngineOptions(dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=4)
    engine = CapturingVllmEngine(resolve_target(tiny_target), options, (*AUX_LAYER_IDS, 4))
    yield OpenEngine(engine)
    engine.close()


@pytest.fixture(scope="module")
def config(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> GenerationConfig:
    """Sampled, so that the sampler of the capturing engine is seen too."""
    folder = tmp_path_factory.mktemp("one-pass")
    write_prompts(folder / "prompts.jsonl", 24)
    return GenerationConfig(
        target=str(tiny_target),
        sampling=SamplingOptions(temperature=1.0, max_tokens=56),  # cuts the longest answers
        validation_fraction=0.3,
        max_truncated=1.0,
        journal_dir=folder / "journals",
        options=EngineOptions(dtype="float32"),
        capture=CaptureConfig(
            store=folder / "store", aux_layer_ids=AUX_LAYER_IDS, format=EXACT, max_shard_bytes=1_000_000
        ),
    )


def run(config: GenerationConfig, engine: OpenEngine | None = None) -> RunReport:
    assert config.journal_dir is not None
    prompts = config.journal_dir.parent / "prompts.jsonl"
    opened = None if engine is None else lambda *_: engine
    return GenerationRun(config, open_engine=opened).run(load_conversations([prompts]))


@pytest.fixture(scope="module")
def report(config: GenerationConfig, engine: OpenEngine) -> RunReport:
    return run(config, engine)


@pytest.fixture(scope="module")
def samples(config: GenerationConfig, report: RunReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set as the builder makes it of the same journal; it has the store's option, and needs no engine."""
    assert config.journal_dir is not None
    prompts, folder = config.journal_dir.parent / "prompts.jsonl", tmp_path_factory.mktemp("samples")
    options = {
        "data_files": str(prompts),
        "target": config.target,
        "max_tokens": config.sampling.max_tokens,
        "validation_fraction": config.validation_fraction,
        "dtype": "float32",
        "journal_dir": str(config.journal_dir),
        "cache_dir": str(folder / "cache"),
        "capture_hidden_states": str(config.capture.store),
        "aux_layer_ids": [1, 2, 3],
        "aux_dtype": "fp32",
        "targets": "state",
    }
    save_whole(eagle3_kimi.load_dataset("kimi_reasoning", **options), folder / "complete")
    with pytest.raises(DataError, match="mixed store"):  # the cached data set does not hide that the store is looked at
        eagle3_kimi.load_dataset("kimi_reasoning", **{**options, "aux_dtype": "bf16"})
    return folder / "complete"


def test_the_store_is_the_one_that_an_extraction_makes(config: GenerationConfig, samples: Path, tmp_path: Path) -> None:
    two_stage = ExtractConfig(
        dataset=samples,
        target=config.target,
        output=tmp_path / "store",
        aux_layer_ids=AUX_LAYER_IDS,
        aux_dtype="fp32",
        targets="state",
        dtype="float32",
        engine="transformers",
    )
    extract_hidden_states(two_stage)
    expected, came = FeatureStore(tmp_path / "store"), FeatureStore(config.capture.store)
    assert_equal_stores(came, expected)
    assert replace(came.manifest, contract=None) == replace(expected.manifest, contract=None)
    assert check_store(config.capture.store).ok
    again = extract_hidden_states(replace(two_stage, output=config.capture.store))
    assert (again.samples, again.skipped) == (0, len(came))


def test_only_complete_samples_have_states(config: GenerationConfig, report: RunReport, engine: OpenEngine) -> None:
    complete = {id for _, ids in report.chains for id in ids if report.index[id].reason == "ok"}
    assert set(FeatureStore(config.capture.store).ids) == complete
    assert report.by_reason.keys() == {"finish_length"}
    assert report.by_reason["finish_length"] > 1
    # what was cut was not even copied out of the engine's cache
    given = Counter(
        (generation.finish_reason, isinstance(generation, CapturedGeneration)) for generation in engine.given
    )
    assert given.keys() == {("stop", True), ("length", False)}
    # one of them ran into the longest sequence of the engine, in the same steps as others
    assert any(len(g.prompt_token_ids) + len(g.output_token_ids) == MAX_MODEL_LEN for g in engine.given)


def test_a_store_that_is_lost_is_captured_again_by_prefill(
    config: GenerationConfig, report: RunReport, engine: OpenEngine, tmp_path: Path
) -> None:
    journal = GenerationRun(config).journal.path
    before = journal.read_bytes()
    again = run(replace(config, capture=replace(config.capture, store=tmp_path / "store")), engine)
    assert (again.generated, again.complete) == (0, report.complete)
    assert journal.read_bytes() == before
    assert_equal_stores(FeatureStore(tmp_path / "store"), FeatureStore(config.capture.store))


_SCRIPT = """
import sys
from pathlib import Path
from tests.generation.test_one_pass import killed_config, run
run(killed_config(sys.argv[1], Path(sys.argv[2])))
"""


def killed_config(target: str, folder: Path) -> GenerationConfig:
    return GenerationConfig(
        target=target,
        sampling=SamplingOptions(max_tokens=128),
        max_incomplete=1.0,
        journal_dir=folder / "journals",
        options=EngineOptions(dtype="bfloat16", max_model_len=512, max_num_seqs=2),
        capture=CaptureConfig(
            store=folder / "store",
            aux_layer_ids=AUX_LAYER_IDS,
            max_shard_bytes=100_000,  # about three samples
            contract_samples=2,
        ),
    )


@pytest.mark.kills
def test_killed_the_store_holds_no_more_than_the_journal_and_the_next_run_makes_them_equal(
    tiny_target: Path, tmp_path: Path
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 24)
    config = killed_config(str(tiny_target), tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", _SCRIPT, str(tiny_target), str(tmp_path)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    journal, store = GenerationRun(config).journal, tmp_path / "store"

    def journaled() -> set[str]:
        return {name for name, entry in journal.index().items() if entry.reason == "ok"}

    def stored() -> set[str]:
        return set(FeatureStore(store).ids) if (store / "store.json").exists() else set()

    # looked at while it stands still: between a look and the kill it could write a shard
    running, ahead = psutil.Process(process.pid), False
    while process.poll() is None and not ahead:
        running.resume()
        time.sleep(0.005)
        running.suspend()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        ahead = bool(stored()) and len(journaled()) > len(stored())
    assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
    children = running.children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    kept = len(journal.index())
    assert stored() < journaled()
    report = run(config)
    assert report.generated == report.planned - report.not_run - kept
    assert stored() == journaled()
    assert {entry.attempts for entry in report.index.values()} == {1}
    assert check_store(store).ok
    manifest = FeatureStore(store).manifest
    assert (manifest.dtype, manifest.contract["passed"]) == ("bfloat16", True)
