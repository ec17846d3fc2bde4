"""What a run does with hidden states, without an engine that computes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eagle3_kimi.cli import app
from eagle3_kimi.engines import Generation, GenerationRequest, SamplingOptions
from eagle3_kimi.errors import EngineError, UsageError
from eagle3_kimi.generation import GenerationConfig, GenerationRun
from eagle3_kimi.hidden_states.capture_config import CaptureConfig
from eagle3_kimi.hidden_states.capturing_engine import CapturedGeneration
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.target import resolve_target
from tests.generation.scripted import Script, ScriptedEngine, conversation

PROMPTS = [conversation(f"question {number}") for number in range(5)]
NUM_CAPTURED, HIDDEN = 4, 128


class BrokenEngine(ScriptedEngine):
    """Its answers are complete, its states are not numbers."""

    def generate(
        self, queue: deque[GenerationRequest], sampling: SamplingOptions, stop_token_ids: tuple[int, ...]
    ) -> Iterator[Generation]:
        for generation in super().generate(queue, sampling, stop_token_ids):
            ids = torch.tensor([*generation.prompt_token_ids, *generation.output_token_ids][:-1])
            states = torch.full((len(ids), NUM_CAPTURED, HIDDEN), torch.nan)
            yield CapturedGeneration(**vars(generation), states=CapturedStates(generation.request_id, ids, states))


def run_with(engine: type[ScriptedEngine], target: Path, folder: Path) -> GenerationRun:
    config = GenerationConfig(
        target=str(target),
        journal_dir=folder / "journals",
        capture=CaptureConfig(store=folder / "store", aux_layer_ids=(1, 2, 3)),
    )
    tokenizer = resolve_target(target).load_tokenizer()
    return GenerationRun(config, open_engine=lambda *_: engine(tokenizer, Script(tokenizer).always))


def test_a_complete_answer_with_bad_states_is_refused_and_reaches_neither(tiny_target: Path, tmp_path: Path) -> None:
    run = run_with(BrokenEngine, tiny_target, tmp_path)
    report = run.run(PROMPTS)
    assert (report.complete, dict(report.by_reason)) == (0, {"finish_abort": len(PROMPTS)})
    rows = [run.journal.read_at(entry.offset)["row"] for _, entry in report.finished_turns()]
    assert all("NaN" in row["detail"] for row in rows)
    assert not (tmp_path / "store").exists()


def test_an_engine_that_gives_no_states_is_an_error(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="gave no hidden states"):
        run_with(ScriptedEngine, tiny_target, tmp_path).run(PROMPTS)


@pytest.mark.parametrize("engine", ["transformers", "server"])
def test_other_engines_refuse_to_capture(engine: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "capture_hidden_states": "features",
        "engine": engine,
        "server_url": "http://127.0.0.1",
    }
    options = [part for name, value in arguments.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path), *options])
    assert isinstance(result.exception, UsageError)
    assert f"only the vllm engine captures hidden states while it generates, not {engine}" in str(result.exception)
