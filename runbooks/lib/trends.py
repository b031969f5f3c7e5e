"""Pure helpers about slow changes: robust trends of block medians of series."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import sqrt
from statistics import median

from opsd.runbooks.base import Series, View
from opsd.runbooks.lib.signals import spread

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
