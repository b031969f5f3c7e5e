"""A launcher that no longer reaches most of the others: whether it may go on, and for how long it waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from opsd import exitcodes
from opsd.launch.io.loop import Timer
from opsd.launch.io.messages import say
from opsd.launch.quorum.port import Plan, Quorum
from opsd.launch.run.claims import Claims
from opsd.launch.run.supervisor import Supervisor

TIE_S = 4.0
"""How long a half that has not most of the nodes at work leaves the claim to the other."""


class Isolation:
    """Of one launcher, which ``leave`` ends after ``limit_s`` seconds alone."""

    def __init__(
        self, node: Supervisor, quorum: Quorum, claims: Claims, leave: Callable[[int, str], None], limit_s: float
    ) -> None:
        self._node = node
        self._quorum = quorum
        self._claims = claims
        self._leave = leave
        self._limit_s = limit_s
        self._alone: Timer | None = None
        self._since = 0.0

    def begin(self) -> None:
        """End the ranks here, and see whether anybody goes on without this side."""
        say("fewer than half of the launchers are within reach; ending the ranks here")
        self._node.end(lambda: self._node.set_state("waiting"))
        self.end()
        self._since = time.monotonic()
        self._alone = self._node.loop.later(self._limit_s, self._give_up)

    def end(self) -> float:
        """There is a head again; for how many seconds the ranks here were gone for want of one, 0 if they were not."""
        if self._alone is None:
            return 0.0
        self._alone.cancel()
        self._alone = None
        return time.monotonic() - self._since

    def _give_up(self) -> None:
        self._leave(exitcodes.REQUEUE, f"no majority of the launchers within reach for {self._limit_s:g} s")

    def break_tie(self, plan: Plan, absent: tuple[str, ...]) -> None:
        """Go on from ``plan`` if the other half has not claimed the next generation, and then cannot.

        The half with most of those at work, or with the first of them, comes first.
        """
        here = [name for name in plan.slots if name not in absent]
        first = 2 * len(here) > len(plan.slots) or (2 * len(here) == len(plan.slots) and plan.slots[0] in here)
        delay_s = 0.0 if first else TIE_S
        number, decide = plan.number + 1, self._quorum.decide_tie
        self._node.loop.later(delay_s, lambda: self._claims.claim_tie(number, decide))
