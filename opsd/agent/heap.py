"""How glibc's malloc serves an agent of thirty threads that runs for months."""

from __future__ import annotations

import ctypes

_ARENA_MAX, _MMAP_THRESHOLD = -8, -3
"""Numbers of ``mallopt``'s parameters in malloc.h."""
ARENAS = 2
MAPPED_FROM_BYTES = 128 * 1024
TRIM_EVERY_S = 300.0


def settle() -> bool:
    """Keep the heap small: few arenas, and large blocks mapped, so that they go back when freed. True if it was done.

    By default each thread gets an arena of its own, up to eight times the number of cores, and cannot use the free
    memory of others. The size from which blocks are mapped also rises to the largest block freed so far. So the texts
    of scrapes fragment the heap. Other C libraries have no ``mallopt``.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_ARENA_MAX, ARENAS)) and bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES))


class Trim:
    """Gives freed memory back to the system; takes some milliseconds.

    glibc does so by itself at the end of an arena only, and what lives longest is there: holes in the middle add up.
    """

    def __init__(self) -> None:
        self._due = 0.0

    def if_due(self, now: float) -> bool:
        """Give memory back if ``TRIM_EVERY_S`` have passed, in monotonic seconds. True if some was."""
        if now < self._due:
            return False
        self._due = now + TRIM_EVERY_S
        try:
            return bool(ctypes.CDLL(None).malloc_trim(0))
        except AttributeError:
            return False
