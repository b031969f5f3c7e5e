"""Sharing what a node can afford among users, so that none of them is left without because of another."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, Protocol
from weakref import WeakSet

_NOTHING: Final = 1e-3


def fill(demands: Sequence[int], total: int) -> list[int]:
    """``total`` shared out: each gets an equal part, and what some do not need goes to the others."""
    given, left = [0] * len(demands), total
    for done, index in enumerate(sorted(range(len(demands)), key=lambda index: demands[index])):
        given[index] = min(demands[index], left // (len(demands) - done))
        left -= given[index]
    return given


def fill_by_owner(demands: Sequence[tuple[int, int]], total: int) -> list[int]:
    """``total`` shared out first among owners, then by each among its own. ``demands`` are (owner, number)."""
    by_owner: dict[int, list[int]] = defaultdict(list)
    for index, (owner, _) in enumerate(demands):
        by_owner[owner].append(index)
    shares = fill([sum(demands[index][1] for index in indices) for indices in by_owner.values()], total)
    given = [0] * len(demands)
    for indices, share in zip(by_owner.values(), shares, strict=True):
        for index, number in zip(indices, fill([demands[index][1] for index in indices], share), strict=True):
            given[index] = number
    return given


class Allowance:
    """Bytes that users may have kept: ``burst`` at once and ``rate`` a second, in equal parts for those there are."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._spent: dict[int, tuple[float, float]] = {}
        self._users = 1

    def begin(self, users: frozenset[int]) -> None:
        """Say who takes from now on."""
        self._users = max(1, len(users))
        self._spent = {user: spent for user, spent in self._spent.items() if user in users}

    def take(self, user: int, size: int, now: float) -> bool:
        """Whether ``user`` may have ``size`` bytes more at the monotonic second ``now``."""
        spent, at = self._spent.get(user, (0.0, now))
        spent = max(0.0, spent - (now - at) * self._rate / self._users)
        if spent + size > self._burst / self._users:
            self._spent[user] = spent, now
            return False
        self._spent[user] = spent + size, now
        return True


class Spent:
    """The share of each user of a resource. Half of it is forgotten in ``half_s``. Any thread may ask."""

    def __init__(self, half_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._half_s, self._clock = half_s, clock
        self._taken: dict[str, tuple[float, float]] = {}

    def __call__(self, user: str) -> float:
        """How much of it is left of ``user``."""
        taken, at = self._taken.get(user, (0.0, 0.0))
        return taken * math.pow(0.5, (self._clock() - at) / self._half_s)

    def add(self, user: str, amount: float) -> None:
        """Count ``amount``; users of whom next to nothing is left are forgotten."""
        self._taken = {who: taken for who, taken in self._taken.items() if self(who) > _NOTHING}
        self._taken[user] = self(user) + amount, self._clock()


class Holder(Protocol):
    """What keeps ``held`` bytes for the user ``owner``."""

    owner: int
    held: int


class Room:
    """Bytes that users may have kept at any time, ``total`` in all. Any thread may ask.

    Each may have half of what the others leave, so that some is left for who comes last. A holder that is gone holds
    nothing.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._holders: WeakSet[Holder] = WeakSet()
        self._guard = threading.Lock()

    def take(self, holder: Holder, size: int) -> bool:
        """Add ``size`` bytes to what ``holder`` holds, if there is room."""
        with self._guard:
            self._holders.add(holder)
            own = sum(one.held for one in self._holders if one.owner == holder.owner)
            others = sum(one.held for one in self._holders if one.owner != holder.owner)
            if own + size > (self._total - others) // 2:
                return False
            holder.held += size
            return True
