"""`report.html` (one file, nothing loaded from elsewhere) and `training.svg`, from what the stages left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from eagle3_kimi.demo import charts
from eagle3_kimi.demo.summary import describe_outcome, describe_stages
from eagle3_kimi.demo.workdir import write_text
from eagle3_kimi.target import Target


def write_report(workdir: Path, summary: dict[str, Any], target: Target) -> None:
    """Writes both files into the demo's folder."""
    from datasets import load_from_disk

    samples = load_from_disk(str(workdir / "samples" / "complete"))
    rows = [row for split in samples.values() for row in _pick_samples(split)]
    lengths = [length for split in samples.values() for length in split["num_reasoning_tokens"]]
    tokenizer = target.load_tokenizer()
    training_charts = build_training_charts(workdir / "drafter" / "metrics.jsonl")
    html = (
        _environment()
        .get_template("report.html.jinja")
        .render(
            summary=summary,
            outcome=describe_outcome(summary),
            stages=describe_stages(summary),
            training_charts=training_charts,
            reasoning_lengths=charts.build_histogram("Reasoning length", lengths, x_label="tokens"),
            samples=[split_into_pieces(row, tokenizer) for row in rows[:2]],
        )
    )
    write_text(workdir / "report.html", html)
    write_text(workdir / "training.svg", draw_charts(training_charts) + "\n")


def draw_charts(drawn: Sequence[charts.Chart]) -> str:
    """Charts side by side as one SVG that needs nothing around it."""
    draw = _environment().get_template("chart.svg.jinja").module.draw  # type: ignore[attr-defined]
    return str(draw(drawn))


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eagle3_kimi.demo", "."),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.globals.update(
        width=charts.WIDTH, height=charts.HEIGHT, left=charts.LEFT, right=charts.RIGHT, bottom=charts.BOTTOM
    )
    return environment


def build_training_charts(metrics: Path) -> list[charts.Chart]:
    """Loss, and joint acceptance of each step, over the optimizer steps of `metrics.jsonl`."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    steps = range(len(lines[0]["acceptance"]) if lines else 0)
    acceptance = {f"step {k + 1}": [(line["step"], line["acceptance"][k]) for line in lines] for k in steps}
    return [
        charts.build_line_chart(
            "Loss", {"loss": [(line["step"], line["loss"]) for line in lines]}, x_label="optimizer step"
        ),
        charts.build_line_chart("Acceptance in training, joint", acceptance, x_label="optimizer step", y_max=1.0),
    ]


def split_into_pieces(row: Mapping[str, Any], tokenizer: Any) -> list[tuple[str, str]]:
    """A sample as `(kind, text)`: the prompt, then its spans with the control tokens between them."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    output, position = row["output_token_ids"], 0
    pieces = [("prompt", decode(row["prompt_token_ids"]))]
    for span in row["spans"]:
        pieces.append(("control", decode(output[position : span["start"]])))
        pieces.append((span["kind"], decode(output[span["start"] : span["end"]])))
        position = span["end"]
    pieces.append(("control", decode(output[position:])))
    return [piece for piece in pieces if piece[1]]


def _pick_samples(split: Any) -> list[Mapping[str, Any]]:
    """The first sample that answers and the first that calls a tool."""
    found: dict[str, int] = {}
    for index, spans in enumerate(split["spans"]):
        found.setdefault(spans[-1]["kind"], index)
        if len(found) == 2:
            break
    return [split[index] for index in found.values()]
