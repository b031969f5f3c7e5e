"""Threads that work in the background, started when there is something to do.

A thread for work that must not stall the training while the run folder's storage does.

Threads that do the work of several peers in turn.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
import traceback
from collections import Counter, deque
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


Job = Callable[[], None]

MAX_WAITING = 512
"""Above this number of waiting jobs those that are no longer wanted are left out."""


class FairQueue:
    """At most ``threads`` threads, started when needed; ``share`` of them work for one peer at the same time.

    Peers take turns: the jobs of one wait for one another, and those of the others overtake them; who has the least
    ``rank`` comes first. Jobs never raise. One that is no longer ``wanted`` is left out, so that a queue whose threads
    are stuck does not keep what waits for them. With ``room`` so many jobs of a peer may wait.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        share: int,
        room: int | None = None,
        rank: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        self._name, self._most, self._share, self._room, self._rank = name, threads, share, room, rank
        self._waiting: dict[str, deque[tuple[Job, Callable[[], bool]]]] = {}
        self._number = 0
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._threads = self._idle = 0
        self._closed = self._finishing = False

    def submit(self, peer: str, job: Job, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Have ``job`` done for ``peer`` if it is still wanted when its turn comes; False if there is no room."""
        with self._changed:
            if self._room is not None and len(self._waiting.get(peer, ())) >= self._room:
                return False
            self._number += 1
            if self._number > MAX_WAITING:
                self._leave_out_unwanted()
            self._waiting.setdefault(peer, deque()).append((job, wanted))
            if not self._idle and self._threads < self._most:
                self._threads += start_thread(f"{self._name}-{self._threads + 1}", self._work)
            self._changed.notify()
            return True

    def close(self, *, finish: bool = False) -> None:
        """Begin no more jobs; with ``finish`` none but those that wait."""
        with self._changed:
            self._finishing, self._closed = finish, not finish
            self._changed.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            peer, job, wanted = taken
            if wanted():
                job()
            with self._changed:
                self._running[peer] -= 1
                if not self._running[peer]:
                    del self._running[peer]
                self._changed.notify()

    def _leave_out_unwanted(self) -> None:
        kept = {peer: deque(each for each in jobs if each[1]()) for peer, jobs in self._waiting.items()}
        self._waiting = {peer: jobs for peer, jobs in kept.items() if jobs}
        self._number = 1 + sum(map(len, self._waiting.values()))

    def _take(self) -> tuple[str, Job, Callable[[], bool]] | None:
        with self._changed:
            while not self._closed:
                free = (peer for peer in self._waiting if self._running[peer] < self._share)
                peer = min(free, key=self._rank, default=None)
                if peer is not None:
                    jobs = self._waiting.pop(peer)
                    job, wanted = jobs.popleft()
                    self._number -= 1
                    if jobs:
                        self._waiting[peer] = jobs  # behind the others
                    self._running[peer] += 1
                    return peer, job, wanted
                if self._finishing and not self._waiting:
                    self._changed.notify_all()
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return None
