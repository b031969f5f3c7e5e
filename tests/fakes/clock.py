"""A clock that a test turns, and a way to wait for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


class FakeClock:
    """Monotonic and wall seconds that stand still until ``advance``."""

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self.now, self.wall_now = now, wall

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.wall_now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.wall_now += seconds


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    """True as soon as ``condition`` is, False if it is not within the time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
