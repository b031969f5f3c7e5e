"""Virtual time: the timers of ``opsd.launch.io.loop`` without a wait."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import TypeVar

from opsd.launch.io.loop import Callback, Timer

T = TypeVar("T")


class VirtualLoop:
    """``opsd.launch.io.loop.Timers`` whose time passes as fast as its callbacks run; it begins at second 0."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []

    def time(self) -> float:
        """The virtual second."""
        return self._now

    def later(self, delay_s: float, callback: Callback) -> Timer:
        timer = Timer(self._now + max(0.0, delay_s), callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T | OSError], None], *, key: str = "") -> bool:
        """Work takes no virtual time."""
        self.later(0.0, lambda: done(work()))
        return True

    def run(self, until_s: float) -> None:
        """Let the time pass."""
        while self._timers and self._timers[0][0] <= until_s:
            self._now, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
        self._now = until_s
