"""A clock that a test turns, and a way to wait for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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


def eventually(condition: Callable[[], T], within_s: float = 60.0) -> T:
    """The first true result of ``condition``, or its last one if none is true within the time.

    An expensive condition is asked less often: what is waited for needs the processor too.
    """
    deadline = time.monotonic() + within_s
    while True:
        asked = time.monotonic()
        result = condition()
        now = time.monotonic()
        if result or now >= deadline:
            return result
        time.sleep(min(0.5, max(0.01, 2 * (now - asked))))


def until(condition: Callable[[], T], within_s: float = 60.0) -> T:
    """The first true result of ``condition``; the test fails without one."""
    result = eventually(condition, within_s)
    assert result, "waited in vain"
    return result
