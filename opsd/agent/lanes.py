"""Threads that do the work of several peers in turn."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

Job = Callable[[], None]

MAX_WAITING = 512
"""Above this number of waiting jobs those that are no longer wanted are left out."""


def start_thread(name: str, work: Job) -> bool:
    """Begin ``work`` in a daemon thread; False if the system has none left, as when somebody's fork bomb has them."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


class Lane:
    """At most ``threads`` threads, started when needed; ``share`` of them work for one peer at the same time.

    Peers take turns: the jobs of one wait for one another, and those of the others overtake them. Jobs never raise. One
    that is no longer ``wanted`` is left out, so that a lane whose threads are stuck does not keep what waits for them.
    """

    def __init__(self, name: str, threads: int, share: int) -> None:
        self._name, self._most, self._share = name, threads, share
        self._waiting: dict[str, deque[tuple[Job, Callable[[], bool]]]] = {}
        self._number = 0
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, peer: str, job: Job, wanted: Callable[[], bool] = lambda: True) -> None:
        """Have ``job`` done for ``peer`` if it is still wanted when its turn comes."""
        with self._changed:
            self._number += 1
            if self._number > MAX_WAITING:
                self._leave_out_unwanted()
            self._waiting.setdefault(peer, deque()).append((job, wanted))
            if not self._idle and self._threads < self._most:
                self._threads += start_thread(f"{self._name}-{self._threads + 1}", self._work)
            self._changed.notify()

    def close(self) -> None:
        """Begin no more jobs."""
        with self._changed:
            self._closed = True
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
                peer = next((peer for peer in self._waiting if self._running[peer] < self._share), None)
                if peer is not None:
                    jobs = self._waiting.pop(peer)
                    job, wanted = jobs.popleft()
                    self._number -= 1
                    if jobs:
                        self._waiting[peer] = jobs  # behind the others
                    self._running[peer] += 1
                    return peer, job, wanted
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return None
