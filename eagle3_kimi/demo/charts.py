"""Geometry of the report's charts; `chart.svg.jinja` draws it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 34, 38
COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d")


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A label at a place along an axis, in pixels."""

    place: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A polyline and its name."""

    label: str
    color: str
    points: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar, in pixels, and what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What one chart is drawn from."""

    title: str
    x_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...] = ()
    bars: tuple[Bar, ...] = ()


def build_line_chart(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_max: float | None = None
) -> Chart:
    """Curves over one pair of axes that start at 0.

    Args:
        title: above the chart.
        series: name -> points (x, y), in order.
        x_label: below the axis.
        y_max: upper end of the y axis; by default the largest value, rounded up.
    """
    points = [point for values in series.values() for point in values] or [(1.0, 1.0)]
    x_ticks, y_ticks = choose_ticks(max(x for x, _ in points)), choose_ticks(y_max or max(y for _, y in points))
    x_end, y_end = max(x_ticks[-1], max(x for x, _ in points)), y_ticks[-1]
    curves = tuple(
        Curve(
            label=name,
            color=COLORS[index % len(COLORS)],
            points=" ".join(f"{_x(x / x_end):.1f},{_y(y / y_end):.1f}" for x, y in values),
        )
        for index, (name, values) in enumerate(series.items())
    )
    return Chart(
        title=title,
        x_label=x_label,
        x_ticks=tuple(Tick(place=_x(value / x_end), label=f"{value:g}") for value in x_ticks),
        y_ticks=tuple(Tick(place=_y(value / y_end), label=f"{value:g}") for value in y_ticks),
        curves=curves,
    )


def build_histogram(title: str, values: Sequence[int], *, x_label: str, num_bins: int = 40) -> Chart:
    """Counts of whole numbers, in at most `num_bins` bins of equal whole width that start at 0."""
    end = max(values, default=0) + 1
    width = math.ceil(end / num_bins)
    counts = [0] * math.ceil(end / width)
    for value in values:
        counts[value // width] += 1
    y_ticks, share = choose_ticks(max(counts)), 1 / len(counts)
    bars = tuple(
        Bar(
            x=_x(index * share) + 0.5,
            y=_y(count / y_ticks[-1]),
            width=_x(share) - _x(0) - 1,
            height=_y(0) - _y(count / y_ticks[-1]),
            title=f"{index * width} to {(index + 1) * width - 1}: {count}",
        )
        for index, count in enumerate(counts)
    )
    x_ticks = [value for value in choose_ticks(end) if value <= width * len(counts)]
    return Chart(
        title=title,
        x_label=x_label,
        x_ticks=tuple(Tick(place=_x(value / width * share), label=f"{value:g}") for value in x_ticks),
        y_ticks=tuple(Tick(place=_y(value / y_ticks[-1]), label=f"{value:g}") for value in y_ticks),
        bars=bars,
    )


def choose_ticks(highest: float, most: int = 6) -> list[float]:
    """At most `most` values from 0 to the first at or above `highest`, in steps of 1, 2 or 5 times a power of ten."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / (most - 1)))
    steps = (factor * power for factor in (1, 2, 5, 10, 20) if math.ceil(highest / (factor * power) - 1e-9) < most)
    step = next(steps)
    return [round(index * step, 10) for index in range(math.ceil(highest / step - 1e-9) + 1)]


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
