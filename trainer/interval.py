"""When the next checkpoint is due."""

from __future__ import annotations

import math
from statistics import median

from opsd.trainer.settings import CheckpointSettings

FIRST_S = 60.0
"""When the first checkpoint of a start is due if the interval depends on a stall that has not been measured yet."""

LEAST_S = 10.0
REMEMBERED = 9


def daly(stall_s: float, mttf_s: float) -> float:
    """The checkpoint interval in seconds with the least total loss to saving and failures: sqrt(2 w M) - w.

    ``stall_s`` w is how long a save stops the training, ``mttf_s`` M the job's mean time to failure (Daly 2006, eq. 20,
    to first order). For a save longer than half of M the result is M.
    """
    return math.sqrt(2 * stall_s * mttf_s) - stall_s if stall_s < mttf_s / 2 else mttf_s


class Interval:
    """Decides at which steps to save, from ``settings`` and the measured stalls; seconds are monotonic."""

    def __init__(self, settings: CheckpointSettings, now: float) -> None:
        self._settings = settings
        self._since = now
        self._stalls: list[float] = []

    @property
    def seconds(self) -> float:
        """The present interval in seconds; not for an interval in steps."""
        if self._settings.minutes:
            return self._settings.minutes * 60
        if not self._stalls:
            return FIRST_S
        return max(LEAST_S, daly(median(self._stalls), self._settings.mttf_hours * 3600))

    def due(self, step: int, now: float) -> bool:
        """Whether a checkpoint is due after ``step``."""
        if self._settings.every:
            return step % self._settings.every == 0
        return now - self._since >= self.seconds

    def saved(self, began: float, stall_s: float) -> None:
        """A save began at ``began`` and stopped the training for ``stall_s``."""
        self._since = began
        self._stalls = [*self._stalls, stall_s][-REMEMBERED:]
