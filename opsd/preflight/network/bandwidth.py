"""Algorithm and bus bandwidth of a collective, as defined by nccl-tests (its doc/PERFORMANCE.md).

With S bytes in total, n ranks and a time t: algbw = S / t, and busbw = algbw * factor. The factor makes busbw
comparable with the speed of the links for any n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from opsd.preflight.stats import nearest_rank

FACTORS: Final[Mapping[str, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}


def algbw(size: int, seconds: float) -> float:
    """Bytes per second of a collective over ``size`` bytes in total."""
    return size / seconds


def busbw(collective: str, size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each link carried. Raises KeyError for a collective without a factor."""
    return algbw(size, seconds) * FACTORS[collective](ranks)


def sizes(low: int = 1 << 10, high: int = 8 << 30, factor: int = 8) -> list[int]:
    """Message sizes in bytes from ``low`` to ``high`` inclusive, each ``factor`` times the previous one."""
    found = []
    size = low
    while size < high:
        found.append(size)
        size *= factor
    return [*found, high]


@dataclass(frozen=True, slots=True)
class Timing:
    """The iteration times of one collective at one size, in seconds; ``size`` is the total in bytes."""

    collective: str
    size: int
    ranks: int
    seconds: tuple[float, ...]

    @property
    def latency(self) -> float:
        """Median seconds of an iteration."""
        return median(self.seconds)

    @property
    def p99(self) -> float:
        """99th percentile of the seconds of an iteration."""
        return nearest_rank(self.seconds, 0.99)

    @property
    def algbw(self) -> float:
        """Bytes per second of the median iteration."""
        return algbw(self.size, self.latency)

    @property
    def busbw(self) -> float:
        """Bus bandwidth of the median iteration."""
        return busbw(self.collective, self.size, self.latency, self.ranks)
