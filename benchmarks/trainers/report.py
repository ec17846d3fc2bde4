"""The comparison as JSON, table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""A cell's fields, its figures, and `acceptance` where it was served."""

_SPEED = ("tokens_per_cpu_second", "tokens_per_second", "peak_mb", "peak_above_load_mb", "anonymous_above_load_mb")


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a trainer, objective and number of steps of the training-time test: medians, and acceptance by seed."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["trainer"], row["objective"] or "", row["ttt_steps"]), []).append(row)
    return [
        {
            "trainer": " ".join(filter(None, (trainer, objective))),
            "ttt_steps": ttt_steps,
            "cells": len(group),
            "optimizer_steps": [row["steps"] for row in group],
            **{key: statistics.median(row[key] for row in group) for key in _SPEED},
            "acceptance_length": [row["acceptance"]["length"] for row in group if row.get("acceptance")],
            "acceptance_per_position": [row["acceptance"]["per_position"] for row in group if row.get("acceptance")],
        }
        for (trainer, objective, ttt_steps), group in groups.items()
    ]


def compute_ratios(entries: Sequence[Row]) -> list[dict[str, Any]]:
    """Each of our entries against the best peer of the same number of steps: faster, smaller, longer accepted."""
    ratios = []
    for entry in entries:
        peers = [other for other in entries if other["ttt_steps"] == entry["ttt_steps"] and not is_ours(other)]
        if not is_ours(entry) or not peers:
            continue
        served = [_mean(peer["acceptance_length"]) for peer in peers if peer["acceptance_length"]]
        length = _mean(entry["acceptance_length"]) / max(served) if served and entry["acceptance_length"] else None
        fastest = max(peer["tokens_per_cpu_second"] for peer in peers)
        memory = {
            key: entry[key] / min(peer[key] for peer in peers)
            for key in ("peak_above_load_mb", "anonymous_above_load_mb")
        }
        ratios.append(
            {
                "trainer": entry["trainer"],
                "ttt_steps": entry["ttt_steps"],
                "speed": entry["tokens_per_cpu_second"] / fastest,
                **memory,
                "acceptance_length": length,
            }
        )
    return ratios


def is_ours(entry: Row) -> bool:
    """Whether the entry is of our trainer, with whatever objective."""
    return str(entry["trainer"]).startswith("ours")


def print_tables(entries: Sequence[Row], ratios: Sequence[Row]) -> None:
    """For people."""
    print(f"{'trainer':26}{'TTT':>4}{'cells':>6}{'tok/CPU s':>11}{'tok/s':>8}{'peak MB':>9}{'above load':>12}", end="")
    print(f"{'anonymous':>11}  acceptance length by seed")
    for entry in entries:
        print(f"{entry['trainer']:26}{entry['ttt_steps']:4}{entry['cells']:6}", end="")
        print(f"{entry['tokens_per_cpu_second']:11.0f}{entry['tokens_per_second']:8.0f}{entry['peak_mb']:9.0f}", end="")
        print(f"{entry['peak_above_load_mb']:12.0f}{entry['anonymous_above_load_mb']:11.0f}  ", end="")
        print(" ".join(f"{length:.3f}" for length in entry["acceptance_length"]) or "not served")
    for ratio in ratios:
        length = ratio["acceptance_length"]
        print(
            f"{ratio['trainer']}, TTT {ratio['ttt_steps']}, over the best peer: speed {ratio['speed']:.2f}, memory "
            f"above load {ratio['peak_above_load_mb']:.2f} (anonymous {ratio['anonymous_above_load_mb']:.2f})"
            + ("" if length is None else f", acceptance length {length:.3f}")
        )


def draw(entries: Sequence[Row], file: Path) -> None:
    """Speed, memory and acceptance length, a bar an entry."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [f"{entry['trainer']}\nTTT {entry['ttt_steps']}" for entry in entries]
    panels = (
        ("tokens a CPU second", ",.0f", [entry["tokens_per_cpu_second"] for entry in entries]),
        ("peak memory above load, MB", ",.0f", [entry["peak_above_load_mb"] for entry in entries]),
        ("acceptance length (vLLM, k = 3, greedy)", ".3f", [_mean(entry["acceptance_length"]) for entry in entries]),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 1 + 0.45 * len(entries)), sharey=True)
    for axis, (title, form, values) in zip(axes, panels, strict=True):
        bars = axis.barh(names, values, color=["C0" if is_ours(entry) else "C7" for entry in entries])
        axis.bar_label(bars, [f"{value:{form}}" if value else "" for value in values], padding=2)
        axis.set_title(title)
        axis.margins(x=0.15)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file)


def _mean(values: Iterable[float]) -> float:
    """0 where there are none."""
    return statistics.fmean(values) if (values := list(values)) else 0.0
