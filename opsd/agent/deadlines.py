"""Functions that are called after a time, all in one thread, which exists while there are any."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count

from opsd.agent.lanes import start_thread


class Deadlines:
    """Thread-safe. The functions do not block and never raise."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._runs = False

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function`` in ``seconds``; later if the system has no thread left before another call of this."""
        with self._changed:
            heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), function))
            self._runs = self._runs or start_thread("deadlines", self._work)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._runs = False
                    return
                left = self._waiting[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                function = heapq.heappop(self._waiting)[2]
            function()
