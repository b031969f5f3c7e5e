"""What pages remember: the last minutes of the few series that they draw, and runs that have ended.

Written by the loop, read by requests.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from opsd.agent.loop import Snapshot
from opsd.collectors.base import RunFact

POINTS: Final = 120
EVERY_S: Final = 10.0
"""Twenty minutes altogether; 1 KiB a series."""
RECENT: Final = 30
"""Points of a sparkline."""

MAX_ENDED: Final = 16
ENDED_S: Final = 86_400.0
"""How many runs that have ended the pages remember, and for how long; the collector forgets them after a minute."""

THROTTLED: Final = "opsd_gpu_throttle_seconds_total"
THROTTLES: Final = ("sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")
TOKENS: Final = "opsd_rank_tokens_per_second"
LOSS: Final = "opsd_rank_loss"
_BY_GPU: Final = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK")

Key = tuple[str, str]
"""Name of the series, and UUID of the GPU or name of the run."""


class History:
    """``note`` stores a point every ``every_s`` seconds; ended series are dropped, ended runs kept."""

    def __init__(self, *, points: int = POINTS, every_s: float = EVERY_S) -> None:
        self._points, self.every_s = points, every_s
        self._at = float("-inf")
        self._seen = _Seen(array("d"), {})
        self._runs: dict[str, tuple[RunFact, float]] = {}

    def note(self, snapshot: Snapshot) -> None:
        """Store a point from ``snapshot`` if one is due."""
        if snapshot.at - self._at < self.every_s:
            return
        self._at = snapshot.at
        old, series = self._seen, {}
        for key, value in current(snapshot).items():
            if math.isfinite(value):
                series[key] = self._with(old.series.get(key), value)
        self._seen = _Seen(self._with(old.times, snapshot.wall), series)
        self._remember(snapshot)

    def with_ended(self, snapshot: Snapshot) -> Snapshot:
        """``snapshot`` with the runs that have ended since, newest first after those that it has."""
        present = {run.run for run in snapshot.runs}
        ended = [run for run, _ in reversed(self._runs.values()) if run.run not in present]
        return replace(snapshot, runs=(*snapshot.runs, *ended)) if ended else snapshot

    def _remember(self, snapshot: Snapshot) -> None:
        runs = {name: seen for name, seen in self._runs.items() if snapshot.wall - seen[1] < ENDED_S}
        for run in snapshot.runs:
            runs.pop(run.run, None)
            runs[run.run] = run, snapshot.wall
        self._runs = dict([*runs.items()][-max(MAX_ENDED, len(snapshot.runs)) :])

    def values(self, name: str, of: str) -> tuple[float, ...]:
        """The newest points of a series, oldest first, as many as a sparkline has."""
        return tuple(self._seen.series.get((name, of), ())[-RECENT:])

    def points(self, name: str, of: str) -> list[tuple[float, float]]:
        """All points of a series with their epoch seconds, oldest first."""
        seen = self._seen
        values = seen.series.get((name, of), _NONE)
        return [*zip(seen.times[len(seen.times) - len(values) :], values, strict=True)]

    def _with(self, past: array[float] | None, value: float) -> array[float]:
        """A copy with one point more: requests read while the loop writes."""
        grown = array("d") if past is None else past[-(self._points - 1) :]
        grown.append(value)
        return grown


class _Seen(NamedTuple):
    """Times, and series that all end at the last of them."""

    times: array[float]
    series: Mapping[Key, array[float]]


_NONE: Final = array("d")


def current(snapshot: Snapshot) -> dict[Key, float]:
    """The newest values: gauges of GPUs by UUID, worst throttle counter by UUID, tokens/s and loss by run."""
    found: dict[Key, float] = {}
    for metric, value, labels in snapshot.select(*_BY_GPU, THROTTLED, TOKENS, LOSS):
        name = metric.name
        if name in _BY_GPU:
            found[name, labels[1]] = value
        elif name == THROTTLED and labels[2] in THROTTLES:
            found[name, labels[1]] = max(value, found.get((name, labels[1]), 0.0))
        elif name == TOKENS:
            found[name, labels[0]] = found.get((name, labels[0]), 0.0) + value
        elif name == LOSS:
            found.setdefault((name, labels[0]), value)
    return found
