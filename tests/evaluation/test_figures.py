from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3_kimi.commands.evaluate import write_plot
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, Divergence
from eagle3_kimi.evaluation.dialogues import Question
from eagle3_kimi.evaluation.figures import Simulation, describe_drafted, describe_plain
from eagle3_kimi.evaluation.report import build_tables
from eagle3_kimi.protocol import ReasoningProtocol

QUESTIONS = [
    Question(benchmark="one", category="easy", messages=({"role": "user", "content": "a"},)),
    Question(benchmark="two", messages=({"role": "user", "content": "b"},)),
]


@pytest.fixture(scope="module")
def protocol(tiny_tokenizer: Any) -> ReasoningProtocol:
    return ReasoningProtocol.from_tokenizer(tiny_tokenizer, "tiny-kimi")


def build_reports(protocol: ReasoningProtocol) -> tuple[AcceptanceReport, AcceptanceReport]:
    """Plain and drafted; two turns, the first of them `r r r </think> a <end>`, the second cut."""
    ((start,),), ((end,),) = protocol.markers.think_start, protocol.markers.think_end
    stop = protocol.markers.stop_token_ids[0]
    outputs = ((7, 7, 7, end, 8, stop), (7, 7, 7, 7))
    prompts = ((start,), (9,) * 300 + (start,))
    plain = AcceptanceReport(
        engine="vllm",
        engine_version="0",
        device="cpu",
        num_speculative_tokens=0,
        num_drafts=0,
        accepted_per_position=(),
        output_token_ids=outputs,
        seconds=2.0,
        tokens_per_step=((1,) * 6, (1,) * 4),
        prompt_token_ids=prompts,
        question_indices=(0, 1),
        too_long=1,
    )
    drafted = AcceptanceReport(
        engine="vllm",
        engine_version="0",
        device="cpu",
        num_speculative_tokens=2,
        num_drafts=4,
        accepted_per_position=(3, 2),
        output_token_ids=(outputs[0], (7, 7, 6, 7)),
        seconds=1.0,
        tokens_per_step=((1, 3, 2), (1, 1, 2)),
        prompt_token_ids=prompts,
        divergences=(
            Divergence(prompt=1, position=2, plain_token=7, drafted_token=6, best_two=(7, 6), logit_gap=1e-4),
        ),
    )
    return plain, drafted


def test_figures_by_hand(protocol: ReasoningProtocol) -> None:
    plain, report = build_reports(protocol)
    assert describe_plain(plain, protocol.markers.stop_token_ids) == {
        "turns": 2,
        "cut_turns": 1,
        "too_long_prompts": 1,
        "questions_ended_early": 0,
        "tokens": 10,
        "seconds": 2.0,
        "tokens_per_second": 5.0,
    }
    simulated = Simulation(source="here", acceptance_per_position=(0.5, 0.5))
    figures = describe_drafted(report, plain, QUESTIONS, protocol, greedy=True, simulated=simulated)
    assert figures["acceptance_length"] == 1 + 3 / 4 + 2 / 4
    assert figures["acceptance_per_position"] == [0.75, 0.5]
    # steps of 3, 2, 1 and 2 tokens; the second starts at the answer
    assert figures["delivered"] == {
        "acceptance_length": 2.0,
        "acceptance_per_position": [0.75, 0.25],
        "steps": 4,
        "tokens": 8,
    }
    lengths = {
        split: {name: part["acceptance_length"] for name, part in figures[split].items()}
        for split in ("by_span", "by_context_length", "by_benchmark", "by_category")
    }
    assert lengths == {
        "by_span": {"reasoning": 2.0, "answer": 2.0},
        "by_context_length": {"0-255": 2.5, "256-511": 1.5},
        "by_benchmark": {"one": 2.5, "two": 1.5},
        "by_category": {"one/easy": 2.5},
    }
    assert figures["speed_up"] == 2.0
    assert figures["simulated"]["gap"] == -0.25
    lossless = figures["lossless"]
    assert (lossless["turns"], lossless["identical_turns"], lossless["largest_logit_gap"]) == (2, 1, 1e-4)
    assert [(d["turn"], d["position"], d["two_best_tokens"]) for d in lossless["divergences"]] == [(1, 2, [7, 6])]
    assert describe_drafted(report, plain, QUESTIONS, protocol, greedy=False)["lossless"] is None


def test_tables_and_plot(protocol: ReasoningProtocol, tmp_path: Path) -> None:
    plain, report = build_reports(protocol)
    drafted = describe_drafted(report, plain, QUESTIONS, protocol, greedy=True)
    result = {
        "drafter": {"name": "export"},
        "target": {"name": "tiny"},
        "engine": {"name": "vllm", "version": "0", "device": "cpu"},
        "settings": {"dtype": "float32", "max_num_seqs": 8, "max_tokens": 99},
        "benchmarks": [{"name": "one"}, {"name": "two"}],
        "results": [{"thinking": True, "temperature": 0.0, "drafted": [drafted, {**drafted, "lossless": None}]}],
    }
    console = Console(width=80, record=True, quiet=False, file=(tmp_path / "table.txt").open("w"))
    for table in build_tables(result):
        console.print(table)
    text = console.export_text()
    for shown in ("export on tiny", "2.25", "2.00x", "1 of 2", "1.0e-04", "float32", "By benchmark"):
        assert shown in text, text
    assert all("…" not in line and len(line) <= 80 for line in text.splitlines())  # a usual terminal shows all of it
    write_plot(result, tmp_path / "acceptance.svg")
    plot = (tmp_path / "acceptance.svg").read_text()
    assert plot.startswith("<svg")
    assert plot.count("<polyline") == 2
