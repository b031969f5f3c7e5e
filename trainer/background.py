"""What the training does not wait for when the storage of the run folder pauses."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable

Work = Callable[[], None]

WAIT_S = 0.05
LIMIT = 10_000
CLOSE_S = 30.0


def run_now(work: Work) -> None:
    """Do ``work`` here and now."""
    work()


class Background:
    """A thread that does what it is given, in order.

    Usually that is soon done, and ``run`` waits for it: of a step that others have seen, everything is written, even if
    the rank is killed now. It waits ``WAIT_S`` at most, and not at all while earlier work is under way. When
    ``LIMIT`` pieces of work wait, more are dropped.
    """

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[Work, threading.Event]] = queue.Queue(LIMIT)
        self._last = threading.Event()
        self._last.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, work: Work) -> None:
        """Have ``work`` done."""
        done = threading.Event()
        try:
            self._waiting.put_nowait((work, done))
        except queue.Full:
            return
        is_idle, self._last = self._last.is_set(), done
        if is_idle:
            done.wait(WAIT_S)

    def finish(self, limit_s: float = CLOSE_S) -> bool:
        """Whether everything is done, at the latest ``limit_s`` from now."""
        return self._last.wait(limit_s)

    def _serve(self) -> None:
        while True:
            work, done = self._waiting.get()
            try:
                work()
            except Exception:  # what is to be told must not end what tells
                traceback.print_exc()
            done.set()
