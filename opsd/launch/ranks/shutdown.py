"""The end of a generation: ranks are asked to stop, then all their processes are killed and collected."""

from __future__ import annotations

import signal
from collections.abc import Callable

from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.reporting import print_message
from opsd.launch.ranks.process import sweep
from opsd.launch.ranks.ranks import Generation, Rank
from opsd.rank_page import write_request

SECOND_STOP_S = 20.0
"""How long a second SIGTERM still waits: Slurm sends SIGKILL 30 s after its SIGTERM (KillWait)."""

_TO_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


class GracefulStop:
    """The orderly stop of a generation; ``late`` is called with a sentence if ranks exceed the timeout."""

    def __init__(self, loop: Loop, timeout_s: float, late: Callable[[str], None]) -> None:
        self.by = ""
        """The origin of the stop, "" without one."""
        self._loop = loop
        self._timeout_s = timeout_s
        self._late = late
        self._requests = 0
        self._deadline: Timer | None = None

    def ask(self, by: str, generation: Generation) -> None:
        """Ask the ranks to stop. A second call limits the wait to 20 s, a third ends it."""
        self._requests += 1
        if self._requests == 1:
            self.by = by
            self._limit(self._timeout_s, generation)
            for rank in generation.running:
                _ask(rank)
        else:
            self._limit(min(self._timeout_s, SECOND_STOP_S) if self._requests == 2 else 0.0, generation)

    def _limit(self, timeout_s: float, generation: Generation) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.later(timeout_s, lambda: self._over(generation))

    def _over(self, generation: Generation) -> None:
        if generation.running:
            names = ", ".join(f"rank {rank.rank}" for rank in generation.running)
            self._late(f"{names} did not stop in time after {self.by} and was killed")

    def explains(self, rank: Rank) -> bool:
        """True for a rank that reads no page and died of the stop signal, forwarded or sent to the whole job."""
        signalled = rank.exit is not None and rank.exit.signal in _TO_STOP
        return bool(self.by) and signalled and not _reads_page(rank)

    def forget(self) -> None:
        """Other ranks are about to start."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.by, self._requests, self._deadline = "", 0, None


def _ask(rank: Rank) -> None:
    try:
        if _reads_page(rank):
            write_request(rank.page_path, "checkpoint_and_stop")
        else:
            rank.child.signal(signal.SIGTERM)
    except OSError as error:
        print_message(f"rank {rank.rank} cannot be asked to stop ({error.strerror}); it is sent SIGTERM")
        rank.child.signal(signal.SIGTERM)


def _reads_page(rank: Rank) -> bool:
    page = rank.page()
    return page is not None and not page.observed


ORPHAN_GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL for processes left over by ranks that finished in order."""
UNKILLABLE_S = 30.0
SWEEP_S = 0.01


class Teardown:
    """Ends ``generation``, then calls ``done``.

    Ranks are killed at once: one that is blocked in a collective could not handle a SIGTERM. With ``gracefully``, for
    ranks that have all finished, their leftover processes get one SIGTERM first. With ``interrupt_s`` the ranks get
    SIGINT, as from a terminal, and that many seconds to end. ``protected`` tells which processes below the launcher are
    not the generation's. Processes that write a staged checkpoint may finish. ``stuck`` is called with the culprits if
    something cannot be killed.
    """

    def __init__(
        self,
        generation: Generation,
        loop: Loop,
        protected: Callable[[int], bool],
        *,
        done: Callable[[], None],
        stuck: Callable[[str], None],
        gracefully: bool = False,
        interrupt_s: float | None = None,
    ) -> None:
        self._generation = generation
        self._loop = loop
        saving = generation.saving
        self._protected = lambda pid: pid in saving or protected(pid)
        self._done = done
        self._stuck = stuck
        self._over = False
        self.interrupting = interrupt_s is not None
        """True while the ranks have time to end on SIGINT."""
        self._told: set[int] | None = set() if gracefully or self.interrupting else None
        self._limit = Timer(0.0, self.kill)
        if interrupt_s is not None:
            self.within(interrupt_s)
            self._signal_ranks(signal.SIGINT)
        elif gracefully:
            self.within(ORPHAN_GRACE_S)
            self._signal_ranks(signal.SIGTERM)
        else:
            self.kill()

    def within(self, seconds: float) -> None:
        """Kill what is left after ``seconds``."""
        self._limit.cancel()
        self._limit = self._loop.later(seconds, self.kill)

    def kill(self) -> None:
        """Kill what is left now."""
        self.interrupting, self._told = False, None
        self._limit.cancel()
        self._limit = self._loop.later(UNKILLABLE_S, self._cannot)
        for rank in self._generation.ranks:
            rank.child.kill_group()

    def advance(self) -> None:
        """Continue if all ranks have ended; to be called at the start and whenever one ends."""
        if self._generation.running:
            return
        if self.interrupting:
            self.interrupting = False
            self.within(ORPHAN_GRACE_S)
        for rank in self._generation.ranks:
            if self._told is None:
                rank.child.kill_group()
            rank.child.reap()
        self._generation.ranks.clear()
        self._sweep()

    def _signal_ranks(self, number: signal.Signals) -> None:
        for rank in self._generation.running:
            rank.child.kill_group(number)

    def _sweep(self) -> None:
        if self._over:
            return
        if sweep(self._protected, signal.SIGKILL if self._told is None else signal.SIGTERM, self._told):
            self._loop.later(SWEEP_S, self._sweep)
            return
        self._over = True
        self._limit.cancel()
        self._done()

    def _cannot(self) -> None:
        self._over = True
        ranks = ", ".join(f"rank {rank.rank} (pid {rank.child.pid})" for rank in self._generation.running)
        self._stuck(ranks or "a process that a rank has left")
