"""The content of acceptance.json as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

_SPANS = ("reasoning", "answer", "tool_call")


def build_tables(result: dict[str, Any]) -> list[Table]:
    """One row for each way to decode and draft length: by span, by position, what was checked, and by benchmark."""
    benchmarks = [benchmark["name"] for benchmark in result["benchmarks"]]
    tables = [_build_main_table(result), _build_position_table(result), _build_check_table(result)]
    return [*tables, _build_benchmark_table(result, benchmarks)] if len(benchmarks) > 1 else tables


def name_result(entry: dict[str, Any]) -> str:
    """How one entry of `results` was decoded."""
    return f"thinking {'on' if entry['thinking'] else 'off'}, temperature {entry['temperature']:g}"


def _build_main_table(result: dict[str, Any]) -> Table:
    engine, settings = result["engine"], result["settings"]
    table = _start_table(
        f"Acceptance length (bonus token included) of {result['drafter']['name']} on {result['target']['name']}",
        ("length", "reasoning", "answer", "tool", "speed-up"),
    )
    table.caption = (
        f"{engine['name']} {engine['version']} on {engine['device']}, {settings['dtype']}, {settings['max_num_seqs']} "
        f"turns side by side, at most {settings['max_tokens']} tokens a turn"
    )
    for start, drafted in _list_rows(result):
        table.add_row(
            *start,
            f"{drafted['acceptance_length']:.2f}",
            *(_show_length(drafted["by_span"].get(span)) for span in _SPANS),
            f"{drafted['speed_up']:.2f}x",
        )
    return table


def _build_check_table(result: dict[str, Any]) -> Table:
    columns = ("same text", "largest logit gap", "simulated", "served", "gap")
    table = _start_table("Greedy text against plain decoding, simulation against serving", columns)
    for start, drafted in _list_rows(result):
        lossless, simulated = drafted["lossless"], drafted["simulated"]
        if lossless is None:
            continue
        gap = lossless["largest_logit_gap"]
        table.add_row(
            *start,
            f"{lossless['identical_turns']} of {lossless['turns']}",
            "-" if gap is None else f"{gap:.1e}",
            _show_length(simulated),
            _show_length(drafted),
            "-" if simulated is None else f"{simulated['gap']:+.2f}",
        )
    return table


def _build_position_table(result: dict[str, Any]) -> Table:
    longest = max(drafted["num_speculative_tokens"] for _, drafted in _list_rows(result))
    table = _start_table("Accepted up to a position", [str(i + 1) for i in range(longest)])
    for start, drafted in _list_rows(result):
        table.add_row(*start, *(f"{share:.2f}" for share in drafted["acceptance_per_position"]))
    return table


def _build_benchmark_table(result: dict[str, Any], names: Sequence[str]) -> Table:
    table = _start_table("By benchmark, as delivered", names)
    for start, drafted in _list_rows(result):
        table.add_row(*start, *(_show_length(drafted["by_benchmark"].get(name)) for name in names))
    return table


def _start_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("thinking", "T", "k", *columns):
        table.add_column(column, justify="left" if column == "thinking" else "right")
    return table


def _list_rows(result: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """What each row starts with, and its figures."""
    for entry in result["results"]:
        for drafted in entry["drafted"]:
            length = str(drafted["num_speculative_tokens"])
            yield ("on" if entry["thinking"] else "off", f"{entry['temperature']:g}", length), drafted


def _show_length(figures: dict[str, Any] | None) -> str:
    return "-" if figures is None else f"{figures['acceptance_length']:.2f}"
