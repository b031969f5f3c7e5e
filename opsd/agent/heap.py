"""How glibc's malloc serves an agent of thirty threads that runs for months."""

from __future__ import annotations

import ctypes

_ARENA_MAX, _MMAP_THRESHOLD = -8, -3
"""Numbers of ``mallopt``'s parameters in malloc.h."""
ARENAS = 2
MAPPED_FROM_BYTES = 128 * 1024


def settle() -> bool:
    """Keep the heap small: few arenas, and large blocks mapped, so that they go back when freed. True if it was done.

    By default each thread gets an arena of its own, up to eight times the number of cores, and what short-lived objects
    leave behind in one is of no use to the others; and the size from which blocks are mapped rises to that of the
    largest block freed so far, so that the texts of scrapes fragment the heap. Other C libraries have no ``mallopt``.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_ARENA_MAX, ARENAS)) and bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES))
