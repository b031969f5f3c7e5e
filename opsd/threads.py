"""Threads that work in the background, started when there is something to do.

A thread for work that must not stall the training while the run folder's storage does.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
import traceback
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


Work = Callable[[], None]

WAIT_S = 0.05
LIMIT = 10_000
CLOSE_S = 30.0


def run_now(work: Work) -> None:
    """Run ``work`` in the caller's thread."""
    work()


class Background:
    """A thread that runs work in order.

    Work is usually done quickly, and ``run`` waits for it: everything of a step that other ranks have seen is then
    written, even if this rank is killed now. It waits ``WAIT_S`` at most, and not at all while earlier work is running.
    Beyond ``LIMIT`` waiting pieces, work is dropped.
    """

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[Work, threading.Event]] = queue.Queue(LIMIT)
        self._last = threading.Event()
        self._last.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, work: Work) -> None:
        """Run ``work`` in the thread."""
        done = threading.Event()
        try:
            self._waiting.put_nowait((work, done))
        except queue.Full:
            return
        is_idle, self._last = self._last.is_set(), done
        if is_idle:
            done.wait(WAIT_S)

    def finish(self, limit_s: float = CLOSE_S) -> bool:
        """Wait up to ``limit_s`` for all work; whether it is done."""
        return self._last.wait(limit_s)

    def _serve(self) -> None:
        while True:
            work, done = self._waiting.get()
            try:
                work()
            except Exception:  # what is to be told must not end what tells
                traceback.print_exc()
            done.set()
