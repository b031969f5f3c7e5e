"""Pure helpers that runbooks share: robust statistics, readings of series, typed access to event data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TypeGuard, TypeVar

from opsd.runbooks.base import Evidence, Series, View
from opsd.stragglers.outliers import spread as spread

K = TypeVar("K")
T = TypeVar("T")


def said(view: View, source: str, *facts: str) -> tuple[Evidence, ...]:
    """What ``source`` says now as evidence; empty facts are left out."""
    return tuple(Evidence(fact, source, view.wall) for fact in facts if fact)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, both in the order of their first appearance."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def excess(value: float, peers: Sequence[float]) -> float:
    """By what share ``value`` lies above the median of ``peers``; 0.1 is 10 %. 0.0 if the median is not positive."""
    middle = median(peers)
    return value / middle - 1.0 if middle > 0 else 0.0


def latest(view: View, metric: str, **labels: str) -> float | None:
    """The value of the only series that matches and has one in this tick, None if there is none or several."""
    values = [value for series in view.select(metric, **labels) if (value := series.last) is not None]
    return values[0] if len(values) == 1 else None


def usual(series: Series, seconds: float) -> float | None:
    """The median of the last ``seconds``, None without samples."""
    values = [value for _, value in series.values(seconds)]
    return median(values) if values else None


def level(series: Series, seconds: float, but_last: float) -> tuple[float, float, int] | None:
    """Median, spread and number of samples of the past, from ``seconds`` ago to ``but_last`` seconds ago."""
    points = series.values(seconds)
    if not points:
        return None
    until = points[-1][0] - but_last
    values = [value for at, value in points if at <= until]
    return (median(values), spread(values), len(values)) if values else None


def seconds_spent(series: Series, seconds: float) -> float:
    """How much of the last ``seconds`` a counter of seconds says was spent in its state.

    Such a counter cannot grow faster than time, so each interval counts for its own length at most: a reset counts
    nothing and one wild sample counts a single interval.
    """
    if series.unchanged(seconds):
        return 0.0
    points, spent = series.values(seconds), 0.0
    if not points or points[0][1] == points[-1][1]:
        return spent
    for (before, low), (after, high) in pairwise(points):
        spent += min(max(high - low, 0.0), after - before)
    return spent


def growth(series: Series, seconds: float) -> float:
    """How much a counter has grown in the last ``seconds``; a reset counts nothing.

    A value that the samples on both sides contradict is left out, so that one outlier is no growth. The newest
    value counts once the next sample confirms it.
    """
    if series.unchanged(seconds):
        return 0.0
    values = [value for _, value in series.values(seconds)]
    if len(values) < 3 or values[0] == values[-1]:
        return 0.0
    settled = values[:1] + [sorted(values[i - 1 : i + 2])[1] for i in range(1, len(values) - 1)]
    return sum(max(after - before, 0.0) for before, after in pairwise(settled))


def counted(number: int, noun: str) -> str:
    """The number with its noun: 1 GPU, 8 GPUs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def text(data: Mapping[str, object], key: str) -> str:
    """The field as text, "" if it is missing or null."""
    value = data.get(key)
    return "" if value is None else str(value)


def number(data: Mapping[str, object], key: str) -> float | None:
    """The field as a finite number, None if it is missing or anything else."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def integer(data: Mapping[str, object], key: str, default: int = -1) -> int:
    """The field as a whole number, ``default`` if it is missing or anything else."""
    value = number(data, key)
    return default if value is None else int(value)


def integers(data: Mapping[str, object], key: str) -> list[int]:
    """The whole numbers in the list of this field, [] if it is missing or anything else. true and false are none."""
    value = data.get(key)
    return [one for one in value if is_integer(one)] if isinstance(value, list | tuple) else []


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is a whole number. To Python true and false are ones, and not to whoever reads the journal."""
    return isinstance(value, int) and not isinstance(value, bool)
