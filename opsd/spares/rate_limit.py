"""A limit on bytes a second that several threads share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.5
"""What was not used is saved up for this long."""


class RateLimit:
    """Lets ``rate`` bytes a second through, None for all; ``wait`` sleeps for as long as it is told."""

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._wait = rate, clock, wait
        self._lock = threading.Lock()
        self._free_at = clock()

    def __call__(self, size: int) -> None:
        """Wait until ``size`` further bytes may pass."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - BURST_S) + size / self._rate
            delay = self._free_at - now
        if delay > 0:
            self._wait(delay)
