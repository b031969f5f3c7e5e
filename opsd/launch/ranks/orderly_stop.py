"""Lets ranks checkpoint at the next step boundary and end, within a limit that shrinks when it is asked for again."""

from __future__ import annotations

import signal
from collections.abc import Callable

from opsd.client import write_request
from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.messages import say
from opsd.launch.ranks.ranks import Generation, Rank

HASTENED_S = 20.0
"""How long a second SIGTERM still waits: Slurm sends SIGKILL 30 s after its own (KillWait)."""

_TO_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


class OrderlyStop:
    """The stop of a generation; ``late`` is called with a sentence if ranks do not stop in time."""

    def __init__(self, loop: Loop, timeout_s: float, late: Callable[[str], None]) -> None:
        self.by = ""
        """Who has asked for it, "" while nobody has."""
        self._loop = loop
        self._timeout_s = timeout_s
        self._late = late
        self._requests = 0
        self._deadline: Timer | None = None

    def ask(self, by: str, generation: Generation) -> None:
        """Ask the ranks to stop; again: wait 20 s, and after that no longer."""
        self._requests += 1
        if self._requests == 1:
            self.by = by
            self._limit(self._timeout_s, generation)
            for rank in generation.running:
                _ask(rank)
        else:
            self._limit(min(self._timeout_s, HASTENED_S) if self._requests == 2 else 0.0, generation)

    def _limit(self, timeout_s: float, generation: Generation) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.later(timeout_s, lambda: self._over(generation))

    def _over(self, generation: Generation) -> None:
        if generation.running:
            names = ", ".join(f"rank {rank.rank}" for rank in generation.running)
            self._late(f"{names} did not stop in time after {self.by} and was killed")

    def explains(self, rank: Rank) -> bool:
        """True for a rank without a page that died of the signal to stop, passed on by us or sent to the whole job."""
        signalled = rank.exit is not None and rank.exit.signal in _TO_STOP
        return bool(self.by) and signalled and rank.page() is None

    def forget(self) -> None:
        """Other ranks are about to start."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.by, self._requests, self._deadline = "", 0, None


def _ask(rank: Rank) -> None:
    try:
        if rank.page() is None:
            rank.child.signal(signal.SIGTERM)
        else:
            write_request(rank.page_path, "checkpoint_and_stop")
    except OSError as error:
        say(f"rank {rank.rank} cannot be asked to stop ({error.strerror}); it is sent SIGTERM")
        rank.child.signal(signal.SIGTERM)
