"""Threads that do the work of several peers in turn."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

Job = Callable[[], None]


class Lane:
    """At most ``threads`` threads, started when needed; ``share`` of them work for one peer at the same time.

    Peers take turns: the jobs of one wait for one another, and those of the others overtake them. Jobs never raise.
    """

    def __init__(self, name: str, threads: int, share: int) -> None:
        self._name, self._most, self._share = name, threads, share
        self._waiting: dict[str, deque[Job]] = {}
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, peer: str, job: Job) -> None:
        """Have ``job`` done for ``peer``."""
        with self._changed:
            self._waiting.setdefault(peer, deque()).append(job)
            if not self._idle and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """Begin no more jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            peer, job = taken
            job()
            with self._changed:
                self._running[peer] -= 1
                if not self._running[peer]:
                    del self._running[peer]
                self._changed.notify()

    def _take(self) -> tuple[str, Job] | None:
        with self._changed:
            while not self._closed:
                peer = next((peer for peer in self._waiting if self._running[peer] < self._share), None)
                if peer is not None:
                    jobs = self._waiting.pop(peer)
                    job = jobs.popleft()
                    if jobs:
                        self._waiting[peer] = jobs  # behind the others
                    self._running[peer] += 1
                    return peer, job
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return None
