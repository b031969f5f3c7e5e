"""The end of a generation: every process of it killed and collected, whatever session it has fled to."""

from __future__ import annotations

import signal
from collections.abc import Callable

from opsd.launch.io.loop import Loop, Timer
from opsd.launch.ranks.process import sweep
from opsd.launch.ranks.ranks import Generation

LEFTOVERS_S = 3.0
"""What processes left over by ranks that finished in order get between SIGTERM and SIGKILL."""
UNKILLABLE_S = 30.0
SWEEP_S = 0.01


class Teardown:
    """Ends ``generation``, then calls ``done``.

    Ranks are killed at once: one that is blocked in a collective could not do anything useful with a SIGTERM. With
    ``gently``, for ranks that have all finished, what they have left running gets one SIGTERM first; with
    ``interrupt_s`` the ranks get SIGINT, as from a terminal, and so many seconds to end of it. ``protected``
    says which processes below the launcher are none of the generation's. Those that are writing a staged checkpoint are
    left to finish. ``stuck`` is called with the culprits if something cannot be killed.
    """

    def __init__(
        self,
        generation: Generation,
        loop: Loop,
        protected: Callable[[int], bool],
        *,
        done: Callable[[], None],
        stuck: Callable[[str], None],
        gently: bool = False,
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
        """While the ranks have time to end of a SIGINT."""
        self._told: set[int] | None = set() if gently or self.interrupting else None
        self._limit = Timer(0.0, self.kill)
        if interrupt_s is not None:
            self.within(interrupt_s)
            self._signal_ranks(signal.SIGINT)
        elif gently:
            self.within(LEFTOVERS_S)
            self._signal_ranks(signal.SIGTERM)
        else:
            self.kill()

    def within(self, seconds: float) -> None:
        """Kill what is left so many seconds from now."""
        self._limit.cancel()
        self._limit = self._loop.later(seconds, self.kill)

    def kill(self) -> None:
        """Wait no longer."""
        self.interrupting, self._told = False, None
        self._limit.cancel()
        self._limit = self._loop.later(UNKILLABLE_S, self._cannot)
        for rank in self._generation.ranks:
            rank.child.kill_group()

    def advance(self) -> None:
        """Go on if all ranks have ended; to be called at the beginning and whenever one has."""
        if self._generation.running:
            return
        if self.interrupting:
            self.interrupting = False
            self.within(LEFTOVERS_S)
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
