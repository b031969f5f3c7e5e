"""Threads that work in the background, started when there is something to do."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


def start_thread(name: str, work: Callable[[], None]) -> bool:
    """Begin ``work`` in a daemon thread; False if the system has none left, as when somebody's fork bomb has them."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


class Deadlines:
    """Functions that are called after a time, all in one thread, which exists while there are any.

    Thread-safe. The functions do not block and never raise.
    """

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
