from __future__ import annotations

import random
from typing import Any

import pytest

from eagle3_kimi.chat import render_answer, render_prompt
from eagle3_kimi.demo import charts
from eagle3_kimi.demo.report import split_into_pieces
from eagle3_kimi.protocol import ReasoningProtocol
from eagle3_kimi.tiny.problems import Problem, generate_problems


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (4.83, [0, 1, 2, 3, 4, 5]),
        (318, [0, 100, 200, 300, 400]),
        (7, [0, 2, 4, 6, 8]),
        (0.031, [0, 0.01, 0.02, 0.03, 0.04]),
        (0, [0, 1]),
    ],
)
def test_ticks_are_round_and_reach_the_highest_value(highest: float, ticks: list[float]) -> None:
    assert charts.choose_ticks(highest) == pytest.approx(ticks)


def test_a_curve_runs_from_corner_to_corner() -> None:
    chart = charts.build_line_chart("t", {"loss": [(0, 5), (100, 0)]}, x_label="step")
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    top, bottom = charts.TOP, charts.HEIGHT - charts.BOTTOM
    assert chart.curves[0].points == f"{left:.1f},{top:.1f} {right:.1f},{bottom:.1f}"
    assert [tick.label for tick in chart.y_ticks] == ["0", "1", "2", "3", "4", "5"]


def test_every_value_is_in_one_bar() -> None:
    values = [random.Random(0).randint(0, 500) for _ in range(300)] + [0, 500]
    chart = charts.build_histogram("t", values, x_label="tokens", num_bins=10)
    counts = [int(bar.title.split(": ")[1]) for bar in chart.bars]
    assert counts == [sum(low <= value < low + 51 for value in values) for low in range(0, 501, 51)]
    heights = [bar.height for bar in chart.bars]
    assert heights.index(max(heights)) == counts.index(max(counts))


@pytest.mark.parametrize("problem", list(generate_problems(6, seed=4)))
def test_a_sample_is_shown_whole_and_each_span_by_its_kind(problem: Problem, tiny_tokenizer: Any) -> None:
    prompt = render_prompt(tiny_tokenizer, problem.messages, tools=problem.tools, preset="tiny-kimi")
    answer = {"reasoning": problem.reasoning, "content": problem.answer, "tool_calls": problem.tool_calls}
    output = render_answer(tiny_tokenizer, answer, preset="tiny-kimi")
    reading = ReasoningProtocol.from_tokenizer(tiny_tokenizer, "tiny-kimi").read(prompt, output, "stop")
    row = {
        "prompt_token_ids": prompt,
        "output_token_ids": output,
        "spans": [{"kind": str(s.kind), "start": s.start, "end": s.end} for s in reading.spans],
    }
    pieces = split_into_pieces(row, tiny_tokenizer)
    assert "".join(text for _, text in pieces) == tiny_tokenizer.decode(prompt + output)
    shown = dict(pieces)
    assert shown["reasoning"] == problem.reasoning
    assert shown.get("answer", "") == problem.answer
    assert ("tool_call" in shown) is bool(problem.tool_calls)
    assert pieces[-1] == ("control", pieces[-1][1])
    assert pieces[-1][1].endswith("<|im_end|>")
