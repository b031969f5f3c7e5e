"""The statistics that runbooks judge by, trends included.

Pure helpers that runbooks share: robust statistics, readings of series, typed access to event data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import sqrt
from statistics import median
from typing import TypeGuard, TypeVar

from opsd.runbooks.base import Evidence, Series, View
from opsd.stragglers.trace import spread as spread

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


# Pure helpers about slow changes: robust trends of block medians of series.


Point = tuple[float, float]

WINDOW_S = 600.0

LEAST_MINUTES = 5
CLEARLY = 5.0
"""Growth in the number of events is clear from so many standard deviations on: a cluster has looks every minute."""

SURE = 4.0
"""A rise is a trend if it is this many times the scatter around it."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through points: growth per unit of x, growth over the whole of them, and scatter around it."""

    slope: float
    rise: float
    noise: float

    @property
    def sure(self) -> bool:
        """True if the line stands out from the scatter."""
        return abs(self.rise) > SURE * self.noise


def due(series: Series, every: float) -> bool:
    """True in one tick of every ``every`` seconds: what changes slowly need not be looked at in each."""
    ticks = [at for at, _ in series.values(every)]
    return len(ticks) < 2 or ticks[-1] // every != ticks[-2] // every


def blocks(points: Iterable[Point], length: float) -> dict[int, float]:
    """Medians of ``points`` over blocks of ``length`` on the x axis, by the number of the block since x = 0."""
    found: dict[int, list[float]] = {}
    for x, value in points:
        found.setdefault(int(x // length), []).append(value)
    return {number: median(values) for number, values in found.items()}


def by_step(view: View, metric: str, run: str, rank: int, **labels: str) -> list[Point]:
    """(step, value) of a rank's series over the window, since the rank last went back to an earlier step."""
    own = {"run": run, "rank": str(rank)}
    numbers, series = view.select("opsd_rank_step", **own), view.select(metric, **own, **labels)
    if not numbers or not series:
        return []
    steps, found = dict(numbers[0].values(WINDOW_S)), list[Point]()
    for at, value in series[0].values(WINDOW_S):
        step = steps.get(at)
        if step is None or (found and step == found[-1][0]):
            continue
        if found and step < found[-1][0]:
            found.clear()
        found.append((step, value))
    return found


def condensed(points: Sequence[Point], count: int) -> list[Point]:
    """Medians of ``points`` in groups of equal size, ``count`` to twice as many, or all points if there are fewer."""
    size = max(1, len(points) // count)
    groups = (points[first : first + size] for first in range(0, len(points) - size + 1, size))
    return [(median(x for x, _ in group), median(y for _, y in group)) for group in groups]


def slope(points: Sequence[Point]) -> float:
    """The median of the slopes between any two points (Theil 1950, Sen 1968): up to 29 % outliers do not bend it.

    0.0 if all points have the same x. Takes time with the square of the number of points.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    return median(slopes) if slopes else 0.0


def trend(points: Sequence[Point] | Mapping[int, float]) -> Trend:
    """The trend of ``points``, or of block medians by block number. Raises StatisticsError without points."""
    pairs = sorted(points.items()) if isinstance(points, Mapping) else sorted(points)
    steep = slope(pairs)
    noise = spread([y - steep * x for x, y in pairs])
    return Trend(steep, steep * (pairs[-1][0] - pairs[0][0]), noise) if pairs else Trend(0.0, 0.0, noise)


def each_minute(series: Series, seconds: float) -> list[float]:
    """How much a counter grew in each of the last minutes, by the medians of its blocks; a reset counts nothing."""
    levels = [level for _, level in sorted(blocks(series.values(seconds), 60.0).items())]
    return [max(after - before, 0.0) for before, after in pairwise(levels)]


def hours_until(limit: float, minutes: Sequence[float]) -> float | None:
    """Hours until the number per minute reaches ``limit`` at its present growth; None without clear growth.

    Growth is clear if the later half has more than the earlier one by several standard deviations of events that come
    at random (Poisson), in clusters as large as the scatter from minute to minute shows.
    """
    half = len(minutes) // 2
    early, late = sum(minutes[:half]), sum(minutes[-half:])
    if len(minutes) < LEAST_MINUTES or late - early < CLEARLY * sqrt(_cluster(minutes) * (early + late)):
        return None
    course = trend(list(enumerate(minutes)))
    return max(limit - minutes[-1], 0.0) / course.slope / 60 if course.slope > 0 and course.sure else None


def _cluster(minutes: Sequence[float]) -> float:
    """Variance by mean, at least 1: by second differences, which steady growth does not change."""
    bends = [after - 2 * here + before for before, here, after in zip(minutes, minutes[1:], minutes[2:], strict=False)]
    variance = sum(bend * bend for bend in bends) / (6 * len(bends))
    return max(1.0, variance * len(minutes) / sum(minutes))


def thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """Medians of the first, the middle and the last third. Raises StatisticsError with fewer than three values."""
    third = len(values) // 3
    return median(values[:third]), median(values[third:-third]), median(values[-third:])
