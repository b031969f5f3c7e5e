"""The kernel log of a simulated node, read by the agent's own collector."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from opsd.collectors.base import NoData, Reading
from opsd.collectors.kmsg import KmsgCollector


class SimulatedKernel:
    """A kernel log in memory. ``clock`` is in seconds since boot, ``wall`` since the epoch."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._records: deque[bytes] = deque()
        self._written = 0
        self._collector = KmsgCollector(open_device=lambda _path: self, clock=clock, wall=wall)

    def say(self, line: str) -> None:
        """Log ``line`` now."""
        self._records.append(f"6,{self._written},{int(self._clock() * 1e6)},-;{line}\n".encode())
        self._written += 1

    def read(self) -> bytes:
        """The next record, as reading /dev/kmsg gives it. Raises BlockingIOError if there is none yet."""
        if not self._records:
            raise BlockingIOError("nothing more to read")
        return self._records.popleft()

    def collect(self) -> Reading | NoData:
        """What the collector reads from the new records."""
        return self._collector.collect()
