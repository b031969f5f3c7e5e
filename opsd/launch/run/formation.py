"""Finds the nodes of the next generation, proposes it, and waits where there are too few."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.messages import say
from opsd.launch.quorum.port import Plan, Quorum
from opsd.launch.run.placement import Shape, generation_of, place

FORM_SETTLE_S = 2.0
"""Once the nodes that are needed have come: how long the first generation waits for the others that are expected."""
REGROUP_S = 2.0
"""How long a new head waits for the others to find it before it says that there are too few."""
KEEP_S = 0.5
"""After a spare has come or gone: how long others may follow before the members are agreed on anew."""

Proposing = Literal["", "generation", "members"]


class Purpose(Protocol):
    """What the head wants with the nodes that are there."""

    @property
    def unfit(self) -> Collection[str]:
        """The nodes that are to run no ranks."""
        ...

    def payload(self, keep: int) -> Mapping[str, Any]:
        """What successors have to know, with the plan; ``keep`` is the generation whose ranks run on, or 0."""
        ...

    def replaced(self) -> None:
        """The next generation is proposed: what was known of the one before no longer matters."""
        ...

    def too_few(self, reason: str) -> None:
        """The time to wait for nodes is over."""
        ...


class Formation:
    """The proposals of one head. A proposal replaces the one before; the quorum says when one is valid."""

    def __init__(self, shape: Shape, quorum: Quorum, loop: Loop, purpose: Purpose) -> None:
        self.plan: Plan | None = None
        """The newest that is valid."""
        self._shape = shape
        self._quorum = quorum
        self._loop = loop
        self._purpose = purpose
        self._proposing: Proposing = ""
        self._waiting: Timer | None = None
        self._regroup_until = 0.0
        self._closed = False

    @property
    def changing(self) -> bool:
        """True while a generation is on its way: what is heard of the one before comes too late."""
        return self._proposing == "generation"

    @property
    def waiting(self) -> bool:
        """True while there are too few nodes."""
        return self._waiting is not None

    @property
    def slots(self) -> tuple[str, ...]:
        """The nodes at work."""
        return self.plan.slots if self.plan is not None else ()

    @property
    def spares(self) -> set[str]:
        """Those that could take a place."""
        return self._quorum.alive.keys() - set(self._purpose.unfit) - set(self.slots)

    def form(self) -> None:
        """Bring about the first generation of the run."""
        self._wait("not enough launchers have come", self._shape.join_s)
        self.renew()

    def take_over(self, plan: Plan) -> None:
        """Go on from ``plan``, made by the head before; some of its members have not found this one yet."""
        self._regroup_until = time.monotonic() + REGROUP_S
        self.plan = plan
        self.keep_soon()

    def begun(self, plan: Plan) -> None:
        """``plan`` is valid."""
        self.plan, self._proposing = plan, ""
        self.keep_soon()

    def renew(self) -> None:
        """Propose the next generation if there are enough nodes for it."""
        if self._closed:
            return
        slots = self._next_slots()
        if slots is None:
            self._proposing = ""
            if self._waiting is None:
                wait_s = max(self._shape.wait_s, self._regroup_until - time.monotonic(), 0.0)
                self._wait("too few nodes are left", wait_s)
            return
        everybody = self._quorum.alive.keys() >= set(self._shape.order)
        if self.plan is None and not everybody and self._waiting is not None:
            self._loop.later(FORM_SETTLE_S, self._propose_if_waiting)
            return
        self._propose(slots)

    def _propose_if_waiting(self) -> None:
        slots = self._next_slots()
        if self._waiting is not None and slots is not None:
            self._propose(slots)

    def _propose(self, slots: tuple[str, ...]) -> None:
        self._stop_waiting()
        self._purpose.replaced()
        self._proposing = "generation"
        self._quorum.propose(slots, self._purpose.payload(keep=0))

    def _next_slots(self) -> tuple[str, ...] | None:
        return place(self._shape, self.slots, self._quorum.alive.keys(), self._purpose.unfit)

    def keep_soon(self) -> None:
        """Have those that have come vote, and those that have gone no longer count, while the ranks run on."""
        self._loop.later(KEEP_S, self._keep)

    def _keep(self) -> None:
        plan = self.plan
        if plan is None or self._closed or self.waiting or self.changing:
            return
        if {member.name for member in plan.members} != self._quorum.alive.keys() and self._all_alive(plan.slots):
            self._proposing = "members"
            self._quorum.propose(plan.slots, self._purpose.payload(keep=generation_of(plan)))

    def _all_alive(self, slots: Sequence[str]) -> bool:
        return self._quorum.alive.keys() >= set(slots)

    def _wait(self, reason: str, wait_s: float) -> None:
        if self.plan is not None and wait_s > 0:
            say(f"{reason}; waiting up to {wait_s:g} s for another")
        self._waiting = self._loop.later(wait_s, lambda: self._too_few(reason))

    def _too_few(self, reason: str) -> None:
        self._waiting = None
        fit = self._quorum.alive.keys() - set(self._purpose.unfit)
        self._purpose.too_few(f"{reason}: {len(fit)} are there, {self._shape.least} are needed")

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def close(self) -> None:
        """Propose nothing more."""
        self._closed = True
        self._stop_waiting()
