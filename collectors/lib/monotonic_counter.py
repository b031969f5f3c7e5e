"""Counters that only ever grow, made of counters that wrap or start over."""

from __future__ import annotations

from collections.abc import Hashable


class MonotonicCounter:
    """Adds up raw readings per key. A total begins with the first reading of its key.

    A reading below the one before is a wrap if the counter went from the last quarter of its ``bits`` to the first.
    Otherwise the counter has restarted at zero.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        self._total: dict[Hashable, int] = {}

    def add(self, key: Hashable, raw: int, *, bits: int = 64) -> int:
        """The total of ``key`` after the reading ``raw``."""
        last = self._last.get(key, 0)
        self._last[key] = raw
        self._total[key] = total = self._total.get(key, 0) + _growth(last, raw, 1 << bits)
        return total


def _growth(last: int, raw: int, size: int) -> int:
    if raw >= last:
        return raw - last
    wrapped = size * 3 // 4 <= last < size and raw < size // 4
    return raw + size - last if wrapped else raw
