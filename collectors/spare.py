"""Whether this node is ready as a spare, from the file in which `opsd spare` keeps its verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from opsd.collectors.base import Metric, NoData, Plugin, Reading, Sample
from opsd.settings.sections import SpareSettings

FILE: Final = "spare.json"
"""In the state folder of the agent; written by ``opsd.spares.pool``."""

READY = Metric("opsd_spare_ready", "1 while this spare may take another node's place, 0 while it may not.")
AGE = Metric("opsd_spare_verified_age_seconds", "Time since this spare was last verified.", unit="seconds")
STAGED = Metric("opsd_spare_staged_bytes", "Training data staged on this spare.", unit="bytes")

METRICS: Final = (READY, AGE, STAGED)


class SpareCollector:
    """Readiness from ``path``; a verdict that has expired, or a file that cannot be read, is not ready."""

    name = "spare"
    metrics = METRICS

    def __init__(self, path: Path | None, *, wall: Callable[[], float] = time.time) -> None:
        self._path, self._wall = path, wall

    def collect(self) -> Reading | NoData:
        """Read the verdict."""
        try:
            content = self._path.read_bytes() if self._path else None
        except FileNotFoundError:
            content = None
        if content is None:
            return NoData("this node is no spare")
        return Reading(parse(content, self._wall()))


def parse(content: bytes, now: float) -> tuple[Sample, ...]:
    """The samples of a verdict at the epoch second ``now``; a damaged one is a spare that is not ready."""
    try:
        verdict: Mapping[str, Any] = json.loads(content)
        ready = verdict["ready"] is True and now < float(verdict["expires_at"])
        age, staged = max(0.0, now - float(verdict["checked_at"])), float(verdict["staged_bytes"])
    except (ValueError, KeyError, TypeError):
        return (Sample(READY, 0.0),)
    return (Sample(READY, float(ready)), Sample(AGE, age), Sample(STAGED, staged))


COLLECTOR = Plugin(
    "spare", SpareSettings, lambda _settings, context: SpareCollector(context.state and context.state / FILE)
)
