"""Work on what users own, in a thread for each user: a file system that hangs stops the work for its user only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_THREADS = 24
MAX_OTHERS = 12
"""Threads in all, and for users who are not among the ``first``.

A user may have thousands of user ids, in a user namespace, and the service 128 threads in all.
"""


class UserThreads(Generic[T]):
    """``name`` is that of the threads. ``taken_s`` is the processor time of all work so far.

    ``failed`` has what the work of users raised that the last call of ``run`` waited for.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._under_way: dict[int, Future[tuple[T, float]]] = {}
        self.taken_s = 0.0
        self.failed: dict[int, BaseException] = {}

    @property
    def blocked(self) -> frozenset[int]:
        """The users whose work had not ended when it was last waited for."""
        return frozenset(self._under_way)

    def run(
        self, work: Mapping[int, Callable[[], T]], within_s: float, first: Collection[int] = frozenset()
    ) -> list[T]:
        """Begin the ``work`` of each user whose last work has ended; all results that come ``within_s``.

        A later result is among those of a later call. Above ``MAX_THREADS``, and above ``MAX_OTHERS`` for users who are
        not among the ``first``, no more is begun. Raises RuntimeError if the system has no thread left.
        """
        for user, one in work.items():
            if user not in self._under_way and self._has_room(user, first):
                future = Future[tuple[T, float]]()
                threading.Thread(target=_do, args=(one, future), name=f"{self._name}-{user}", daemon=True).start()
                self._under_way[user] = future
        wait(self._under_way.values(), within_s)
        ended = {user: future for user, future in self._under_way.items() if future.done()}
        self._under_way = {user: future for user, future in self._under_way.items() if user not in ended}
        self.failed = {user: error for user, future in ended.items() if (error := future.exception()) is not None}
        results = [future.result() for user, future in ended.items() if user not in self.failed]
        self.taken_s += sum(seconds for _, seconds in results)
        return [result for result, _ in results]

    def _has_room(self, user: int, first: Collection[int]) -> bool:
        if user in first:
            return len(self._under_way) < MAX_THREADS
        return sum(other not in first for other in self._under_way) < MAX_OTHERS


def _do(work: Callable[[], T], future: Future[tuple[T, float]]) -> None:
    try:
        result = work()
    except BaseException as error:
        # SystemExit, too, is an error of the work.
        future.set_exception(error)
    else:
        future.set_result((result, time.thread_time()))
