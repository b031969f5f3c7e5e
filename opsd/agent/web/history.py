"""The last minutes of the few series that the page draws. Written by the loop, read by requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

from opsd.agent.loop import Snapshot

POINTS: Final = 30
EVERY_S: Final = 10.0
"""Five minutes altogether."""

THROTTLED: Final = "opsd_gpu_throttle_seconds_total"
THROTTLES: Final = ("sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")
TOKENS: Final = "opsd_rank_tokens_per_second"
LOSS: Final = "opsd_rank_loss"
_BY_GPU: Final = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK")

Key = tuple[str, str]
"""Name of the series, and UUID of the GPU or name of the run."""


class History:
    """``note`` stores a point every ``every_s`` seconds; ended series are dropped."""

    def __init__(self, *, points: int = POINTS, every_s: float = EVERY_S) -> None:
        self._points, self.every_s = points, every_s
        self._at = float("-inf")
        self._series: Mapping[Key, deque[float]] = {}

    def note(self, snapshot: Snapshot) -> None:
        """Store a point from ``snapshot`` if one is due."""
        if snapshot.at - self._at < self.every_s:
            return
        self._at = snapshot.at
        series = {}
        for key, value in current(snapshot).items():
            if not math.isfinite(value):
                continue
            series[key] = deque(self._series.get(key, ()), self._points)
            series[key].append(value)
        self._series = series

    def values(self, name: str, of: str) -> tuple[float, ...]:
        """The points of a series, oldest first."""
        return tuple(self._series.get((name, of), ()))


def current(snapshot: Snapshot) -> dict[Key, float]:
    """The newest values: gauges of GPUs by UUID, worst throttle counter by UUID, tokens/s and loss by run."""
    found: dict[Key, float] = {}
    for group in snapshot.samples:
        for metric, value, labels in group:
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
