"""A thread that brings what ranks print to where it goes, at the pace of that place."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import dataclass
from typing import Protocol

INTERVAL_S = 0.05
CLOSE_S = 60.0
"""What a reader that is slow but goes on is given at the end."""
LINGER_S = 60.0
"""How long processes that outlive their rank, to finish a checkpoint, are still listened to."""


class Follower(Protocol):
    """Follows one stream or more."""

    def pull(self) -> bool:
        """Pass on what is new; False if nothing is."""

    def insists(self) -> bool:
        """Whether it should be pulled again before the others, as it is in the middle of a line."""

    def finish(self) -> None:
        """Nothing more will be asked for."""


@dataclass(slots=True, eq=False)
class _Followed:
    follower: Follower
    until: float | None = None


class Drain:
    """Pulls its followers until they are finished; a place that stands still holds up this thread only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._followed: list[_Followed] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._moved = time.monotonic()

    def follow(self, follower: Follower) -> None:
        """Pull ``follower`` from now on. Raises OSError if there can be no thread for it."""
        with self._lock:
            self._followed.append(_Followed(follower))
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, "no thread can be started; see `ulimit -u`") from error
            self._thread = thread

    def end_generation(self, linger_s: float = LINGER_S) -> None:
        """The ranks followed so far have ended: finish with each after ``linger_s`` seconds, once it is quiet."""
        until = time.monotonic() + linger_s
        with self._lock:
            for followed in self._followed:
                followed.until = until if followed.until is None else min(until, followed.until)

    def close(self, patience_s: float) -> bool:
        """Pass on what is left, until nothing has gone on for ``patience_s`` seconds; False if some is left then."""
        self.end_generation(0.0)
        self._wake.set()
        began = self._moved = time.monotonic()
        while self._followed:
            now = time.monotonic()
            if now - self._moved > patience_s or now - began > CLOSE_S:
                return False
            time.sleep(INTERVAL_S / 10)
        return True

    def _pull(self, follower: Follower) -> bool:
        new = False
        while follower.pull():
            new, self._moved = True, time.monotonic()
            if not follower.insists():
                break
        return new

    def _run(self) -> None:
        while True:
            with self._lock:
                followed = list(self._followed)
            busy = False
            for each in followed:
                over = each.until is not None and time.monotonic() >= each.until
                if self._pull(each.follower):
                    busy = True
                elif over:
                    each.follower.finish()
                    with self._lock:
                        self._followed.remove(each)
            if not busy:
                self._wake.wait(INTERVAL_S)
                self._wake.clear()
