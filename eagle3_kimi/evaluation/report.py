"""The content of acceptance.json as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

_SPANS = ("reasoning", "answer", "tool_call")


def build_tables(result: dict[str, Any]) -> list[Table]:
    """One row for each way to decode and draft length; a second table by benchmark where there are several."""
    engine, settings = result["engine"], result["settings"]
    main = Table(
        title=f"Acceptance length (bonus token included) of {result['drafter']['name']} on {result['target']['name']}",
        caption=f"{engine['name']} {engine['version']} on {engine['device']}, {settings['dtype']}, "
        f"{settings['max_num_seqs']} turns side by side, at most {settings['max_tokens']} tokens a turn",
    )
    for column in ("decoding", "k", "length", "per position", *_SPANS, "speed-up", "same text", "simulated (gap)"):
        main.add_column(column.replace("_", " "), justify="left" if column == "decoding" else "right")
    for name, drafted in _list_drafted(result):
        main.add_row(
            name,
            str(drafted["num_speculative_tokens"]),
            f"{drafted['acceptance_length']:.2f}",
            " ".join(f"{share:.2f}" for share in drafted["acceptance_per_position"]),
            *(_length(drafted["by_span"].get(span)) for span in _SPANS),
            f"{drafted['speed_up']:.2f}x",
            _describe_losslessness(drafted["lossless"]),
            _describe_simulated(drafted["simulated"]),
        )
    return [main, _build_benchmark_table(result)] if len(result["benchmarks"]) > 1 else [main]


def _build_benchmark_table(result: dict[str, Any]) -> Table:
    names = [benchmark["name"] for benchmark in result["benchmarks"]]
    table = Table(title="Acceptance length by benchmark, as delivered")
    table.add_column("decoding")
    for column in ("k", *names):
        table.add_column(column, justify="right")
    for name, drafted in _list_drafted(result):
        lengths = (_length(drafted["by_benchmark"].get(benchmark)) for benchmark in names)
        table.add_row(name, str(drafted["num_speculative_tokens"]), *lengths)
    return table


def name_result(result: dict[str, Any]) -> str:
    """How one entry of `results` was decoded."""
    return f"thinking {'on' if result['thinking'] else 'off'}, temperature {result['temperature']:g}"


def _list_drafted(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in result["results"]:
        for drafted in entry["drafted"]:
            yield name_result(entry), drafted


def _length(figures: dict[str, Any] | None) -> str:
    return "-" if figures is None else f"{figures['acceptance_length']:.2f}"


def _describe_losslessness(lossless: dict[str, Any] | None) -> str:
    if lossless is None:
        return "sampled"
    text = f"{lossless['identical_turns']} of {lossless['turns']}"
    gap = lossless["largest_logit_gap"]
    return text if gap is None else f"{text}, gap {gap:.1e}"


def _describe_simulated(simulated: dict[str, Any] | None) -> str:
    return "-" if simulated is None else f"{simulated['acceptance_length']:.2f} ({simulated['gap']:+.2f})"
