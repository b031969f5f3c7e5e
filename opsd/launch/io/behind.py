"""Work that may block, done in order in a thread of its own: who hands it over never waits for it."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

Work = Callable[[], None]
LIMIT = 4096
_all: weakref.WeakSet[Behind] = weakref.WeakSet()


class Behind:
    """Does what is ``put``, one after the other. What does not fit into the queue is left out and counted.

    ``missed`` is called in the thread with the number of what was left out, once the work goes on. The thread does not
    keep the process from ending: a file system that hangs must not hang the launcher. Work handles its own errors.
    """

    def __init__(self, name: str, *, limit: int = LIMIT, missed: Callable[[int], None] | None = None) -> None:
        self._name = name
        self._limit = limit
        self._tell_missed = missed
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._missed = 0
        self._thread: threading.Thread | None = None
        _all.add(self)

    @property
    def name(self) -> str:
        """What the work is for."""
        return self._name

    def put(self, work: Work) -> None:
        """Have ``work`` done after what was put before it; never waits."""
        with self._lock:
            if self._queue.qsize() >= self._limit or not self._served():
                self._missed += 1
            else:
                self._queue.put(work)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is done, for at most ``timeout_s`` seconds; False if some is left."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(timeout_s)

    def _served(self) -> bool:
        """Whether there is a thread; the limit of processes may keep it from being started for now."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _run(self) -> None:
        while True:
            self._queue.get()()
            with self._lock:
                missed, self._missed = self._missed, 0
            if missed and self._tell_missed is not None:
                self._tell_missed(missed)


def flush_all(timeout_s: float) -> list[str]:
    """Wait until everything that was put anywhere is done, for at most ``timeout_s`` seconds; what is late, by name."""
    deadline = time.monotonic() + timeout_s
    late = [behind.name for behind in list(_all) if not behind.flush(max(0.0, deadline - time.monotonic()))]
    return sorted(late)
