"""A figure that a file of this cluster gives, and what is refused of it: the impossible, and what is too old."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from opsd.plan.hardware import Figure

STALE_DAYS: Final = 180
"""Drivers, firmware and cables change within half a year."""
_AHEAD_S: Final = 86_400.0


class NotUsable(ValueError):
    """A file of measurements that a plan cannot be made with; the message is one sentence with the fix."""


class TooLittle(NotUsable):
    """A file with nothing wrong in it, but nothing yet from which a figure follows."""


class Evidence(NamedTuple):
    """A value for the figure ``name`` of a plan, in its unit, measured at the epoch second ``at``."""

    name: str
    value: float
    source: str
    file: Path
    at: float


def checked(found: Iterable[Evidence], known: Mapping[str, Figure], now: float) -> Iterator[Evidence]:
    """``found``, if all of it can be. Raises NotUsable."""
    for each in found:
        low, high = _possible(each.name, known)
        figure = known[each.name]
        if not low <= each.value <= high:
            raise NotUsable(
                f"{each.file}: {each.name} of {each.value:.4g} {figure.unit} is impossible, between {low:.4g} and "
                f"{high:.4g} it could be; measure again, or leave the file out"
            )
        if each.at > now + _AHEAD_S:
            raise NotUsable(f"{each.file} is of {day(each.at)}, in the future: set the clock and measure again")
        if (age := (now - each.at) / 86_400) > STALE_DAYS:
            raise NotUsable(
                f"{each.file} is of {day(each.at)}, {age:.0f} days ago, and counts for {STALE_DAYS}: measure again"
            )
        yield each


def figures(found: Iterable[Evidence], known: Mapping[str, Figure]) -> dict[str, Figure]:
    """By name; of several values the newest."""
    return {
        each.name: Figure(each.value, known[each.name].unit, each.source, True, str(each.file), day(each.at))
        for each in sorted(found, key=lambda each: each.at)
    }


def day(at: float) -> str:
    """The local day of an epoch second, as 2026-11-23."""
    return time.strftime("%Y-%m-%d", time.localtime(at))


def _possible(name: str, known: Mapping[str, Figure]) -> tuple[float, float]:
    """The valid range of a figure.

    Links carry at most twice what is usual for such a GPU, and at least a fiftieth: less is no network of GPUs. Memory
    has what its data sheet says.
    """
    usual = known[name].value
    match name:
        case "gemm" | "attention":
            return 0.05, 1.0
        case "bandwidth":
            return 0.05 * usual, usual / 0.87
        case "loop":
            return 0.05, 1.5
        case "nvlink" | "network":
            return 0.02 * usual, 2 * usual
        case "node_latency" | "network_latency":
            return 1e-7, 0.1
        case "spread" | "data" | "evaluation" | "slow":
            return 0.0, 0.5
        case "failures" | "outages" | "maintenance":
            return 1e-9, 1.0
        case "repair":
            return 60.0, 365 * 86_400.0
        case "restart" | "stall":
            return 1e-3, 86_400.0
        case _:
            return 1e6, 1e12
