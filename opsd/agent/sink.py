"""Lines to stderr that never wait for its reader, and a count of those that were not read."""

from __future__ import annotations

import os
import select
import threading
from typing import Final

_PART: Final = select.PIPE_BUF
"""Bytes that can be written without waiting to what poll(2) calls writable."""


class Sink:
    """A file descriptor for lines, for any thread.

    A pipe that nobody reads, a stopped terminal and a journal that hangs lose lines, which ``lost`` counts. The
    descriptor is not made non-blocking: others may share it.
    """

    def __init__(self, descriptor: int) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self._cut = False
        self._guard = threading.Lock()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def line(self, text: str) -> bool:
        """Write ``text`` as a line; False if it is lost. Lines of threads do not mix."""
        with self._guard:
            written = self._write(("\n" * self._cut + text + "\n").encode(errors="replace"))
            self._cut = self._cut and not written
            self.lost += not written
            return written

    def _write(self, data: bytes) -> bool:
        while data:
            try:
                if not any(event & select.POLLOUT for _, event in self._poll.poll(0)):
                    return False
                written = os.write(self._descriptor, data[:_PART])
            except OSError:
                return False
            self._cut, data = True, data[written:]
        return True
