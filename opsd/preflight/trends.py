"""Trends as a table: a row per series with a small curve, its median, scatter and newest value."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from rich.table import Table

from opsd.preflight.history import Trend
from opsd.preflight.stats import mad
from opsd.preflight.units import quantity

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 20


def sparkline(values: Sequence[float]) -> str:
    """One bar per value; the lowest bar is the smallest value. Equal values give a line in the middle."""
    low, high = min(values), max(values)
    if low == high:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def render(trends: Sequence[Trend]) -> Table:
    """The table of all trends."""
    table = Table(box=None, pad_edge=False)
    for heading in ("measure", "of", "trend", "median", "scatter", "last"):
        table.add_column(heading, justify="right" if heading in ("median", "scatter", "last") else "left")
    for trend in trends:
        values = [entry.value for entry in trend.past]
        table.add_row(
            f"{trend.check} {trend.measure.replace('_', ' ')}",
            trend.subject,
            sparkline(values[-_WIDTH:]),
            quantity(median(values), trend.unit),
            quantity(mad(values), trend.unit),
            quantity(values[-1], trend.unit),
        )
    return table
