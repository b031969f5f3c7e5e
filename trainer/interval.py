"""When the next checkpoint is due."""

from __future__ import annotations

import math
from statistics import median

from opsd.trainer.settings import CheckpointSettings

FIRST_S = 60.0
"""The first checkpoint of a start comes after this if its interval follows from a stall that has yet to be measured."""

LEAST_S = 10.0
REMEMBERED = 9


def daly(stall_s: float, mttf_s: float) -> float:
    """The interval in seconds that loses least to saving and to failures together: sqrt(2 w M) - w.

    ``stall_s`` w is what a save holds the training up, ``mttf_s`` M the job's mean time to failure (Daly 2006, eq. 20,
    to first order; a save that takes longer than half of M is not worth planning for, and M is returned).
    """
    return math.sqrt(2 * stall_s * mttf_s) - stall_s if stall_s < mttf_s / 2 else mttf_s


class Interval:
    """Says at which steps to save, from ``settings`` and from what saving has cost so far; seconds are monotonic."""

    def __init__(self, settings: CheckpointSettings, now: float) -> None:
        self._settings = settings
        self._since = now
        self._stalls: list[float] = []

    @property
    def seconds(self) -> float:
        """Seconds between checkpoints as things stand; not for an interval in steps."""
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
        """A save began at ``began`` and held the training up for ``stall_s``."""
        self._since = began
        self._stalls = [*self._stalls, stall_s][-REMEMBERED:]
