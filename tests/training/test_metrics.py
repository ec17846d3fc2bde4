from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.protocol import Span, SpanKind
from eagle3_kimi.training.log import MetricsLog, describe_chains, flatten
from eagle3_kimi.training.metrics import ChainCounts, Counts, pack_counts
from eagle3_kimi.training.progress import TrainProgress
from eagle3_kimi.training.spans import SPAN_NAMES, read_span_kinds
from tests.training.toy import ToyTarget

REASONING, ANSWER, MARKER = (SPAN_NAMES.index(name) for name in ("reasoning", "answer", "marker"))


def count_two_documents() -> torch.Tensor:
    """Rows 0 1 2 | 3 4, three steps; row 1 starts with a control token, the second document is all answer."""
    rows = PackedRows.build([(1, 3), (1, 2)], ttt_steps=3)
    hits = [
        torch.tensor([1, 1, 0, 1, 0]).bool(),  # rows 0 1 2 | 3 4
        torch.tensor([0, 1, 1]).bool(),  # rows 0 1 | 3: row 0 breaks here
        torch.tensor([1]).bool(),  # row 0: a hit after a miss is none
    ]
    reachable = [torch.tensor([1, 1, 1, 1, 0]).bool(), torch.tensor([1, 1, 1]).bool(), torch.tensor([1]).bool()]
    kinds = torch.tensor([REASONING, MARKER, ANSWER, ANSWER, ANSWER])
    return pack_counts(torch.tensor(8.0), torch.tensor(4), 11, hits, reachable, kinds, rows)


def test_chains_break_at_the_first_miss() -> None:
    vector = count_two_documents()
    counts = Counts.unpack(vector + vector)  # two ranks
    assert (counts.loss, counts.tokens) == (2.0, 22)
    assert (counts.total.hits, counts.total.chains) == ((6, 4, 0), (10, 6, 2))
    assert counts.total.acceptance == (3 / 5, 2 / 3, 0.0)
    assert counts.total.simulated_acceptance_length == pytest.approx(1 + 3 / 5 + 2 / 3)
    assert counts.total.acceptance_ceiling == pytest.approx(1 + 4 / 5 + 1 + 1)


def test_a_chain_belongs_to_the_span_it_starts_in() -> None:
    spans = Counts.unpack(count_two_documents()).spans
    assert spans["reasoning"] == ChainCounts(hits=(1, 0, 0), reachable=(1, 1, 1), chains=(1, 1, 1))
    assert spans["marker"] == ChainCounts(hits=(1, 1, 0), reachable=(1, 1, 0), chains=(1, 1, 0))
    assert spans["answer"] == ChainCounts(hits=(1, 1, 0), reachable=(2, 1, 0), chains=(3, 1, 0))
    assert spans["tool_call"].chains == (0, 0, 0)
    assert list(describe_chains(Counts.unpack(count_two_documents()))["spans"]) == ["reasoning", "answer", "marker"]


def test_kinds_are_those_of_the_predicted_tokens() -> None:
    """Output `t t </think> a a <end>`: the first is the target's own, so five are predicted."""
    sample = replace(
        ToyTarget().sample(0, prompt=3, output=6),
        spans=(Span(SpanKind.REASONING, 0, 2), Span(SpanKind.ANSWER, 3, 5)),
    )
    names = [SPAN_NAMES[kind] for kind in read_span_kinds(sample)]
    assert names == ["reasoning", "marker", "answer", "answer", "marker"]
    assert len(names) == len(sample.target_argmax)


def test_counts_without_a_supervised_token() -> None:
    counts = Counts.unpack(torch.zeros(3 + 3 * len(SPAN_NAMES), dtype=torch.float64))
    assert (counts.loss, counts.total.acceptance, counts.total.acceptance_ceiling) == (0.0, (0.0,), 1.0)


def test_lines_go_to_the_file_and_to_the_tracker(tmp_path: Path) -> None:
    tracked: dict[int, dict[str, float]] = {}
    file = tmp_path / "metrics.jsonl"
    log = MetricsLog(file, 0, active=True, track=lambda values, step: tracked.__setitem__(step, values))
    for step in (1, 2):
        log.add(count_two_documents())
        log.write(step, lr=0.5, grad_norm=torch.tensor(3.0))
    log.write_evaluation(3, Counts.unpack(count_two_documents()))

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["split"]) for line in lines] == [(1, "train"), (2, "train"), (3, "validation")]
    assert lines[1]["total_supervised_tokens"] == 8
    assert tracked[2]["train/acceptance/1"] == 0.6
    assert (tracked[2]["train/lr"], tracked[2]["train/grad_norm"]) == (0.5, 3.0)
    assert tracked[3]["validation/spans/answer/acceptance/1"] == pytest.approx(1 / 3)

    again = MetricsLog(file, 1, active=True, track=lambda values, step: None)  # resumes after step 1
    assert again.supervised_tokens == 4
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1]


def test_only_numbers_are_tracked() -> None:
    assert flatten({"step": 3, "a": {"b": [1, 2.5]}, "name": "x", "none": None}, "train") == {
        "train/a/b/1": 1,
        "train/a/b/2": 2.5,
    }


def test_progress_without_a_terminal_is_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counts.unpack(count_two_documents())
    with caplog.at_level(logging.INFO, logger="eagle3_kimi"):
        with TrainProgress(10, 4, active=True, log_every_s=3600) as progress:
            progress.advance(5, counts)
            progress.advance(6, counts)
            assert not caplog.messages
        with TrainProgress(10, 4, active=True, log_every_s=0) as progress:
            progress.advance(5, counts)
        with TrainProgress(10, 4, active=False, log_every_s=0) as progress:
            progress.advance(5, counts)
    assert [message.split(",")[0] for message in caplog.messages] == [
        "training: step 6/10", "training: step 5/10", "training: step 5/10",
    ]  # fmt: skip
    assert "loss 2.000, acceptance 0.60 0.67 0.00" in caplog.messages[0]
    assert "tokens/s, about " in caplog.messages[0]


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with TrainProgress(10, 4, active=True) as progress:
        progress.advance(7, Counts.unpack(count_two_documents()))
    shown = capsys.readouterr().err
    assert "7/10" in shown
    assert "acceptance 0.60 0.67 0.00" in shown
