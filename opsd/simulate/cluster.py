"""The cluster as Slurm sees it, in virtual time. Drains and returns go by the rules of ``opsd.slurm.ownership``."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, TypeVar

from opsd.launch.io.loop import Callback, Timer
from opsd.settings.policy import PolicySettings
from opsd.simulate.faults import ClusterEffect, SimulatedFault
from opsd.slurm import ownership
from opsd.slurm.ownership import PreflightResult
from opsd.slurm.port import Node, NodeUpdate
from opsd.slurm.topology import Topology, even

T = TypeVar("T")


class VirtualLoop:
    """``opsd.launch.io.loop.Timers`` whose time passes as fast as its callbacks run; it begins at second 0."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []

    def time(self) -> float:
        """The virtual second."""
        return self._now

    def later(self, delay_s: float, callback: Callback) -> Timer:
        timer = Timer(self._now + max(0.0, delay_s), callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T | OSError], None], *, key: str = "") -> bool:
        """Work takes no virtual time."""
        self.later(0.0, lambda: done(work()))
        return True

    def run(self, until_s: float) -> None:
        """Let the time pass."""
        while self._timers and self._timers[0][0] <= until_s:
            self._now, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
        self._now = until_s


NO_TOPOLOGY: Final = Topology()
DOWN = "Not responding"
"""Slurm's own reason; such a node is in service again as soon as it answers."""


class Cluster:
    """Its nodes, those that are broken, and those that are held. ``returned`` is called when a node is in service.

    The nodes are the first of ``topology``, in its order, which has as many. If it has none their names are made up,
    and ``per_switch`` of them, in order, hang from each leaf switch; with 0 the switches are not known.
    """

    def __init__(
        self,
        size: int,
        loop: VirtualLoop,
        rules: PolicySettings,
        person_s: float,
        returned: Callable[[str], None],
        per_switch: int = 0,
        topology: Topology = NO_TOPOLOGY,
    ) -> None:
        self.names = (*islice(topology.leaf, size),) or tuple(f"n{number:05d}" for number in range(1, size + 1))
        self.topology = even(self.names, per_switch) if per_switch else topology
        self.broken: dict[str, SimulatedFault] = {}
        self.drains_refused = 0
        self._loop = loop
        self._rules = rules
        self._person_s = person_s
        self._returned = returned
        self._nodes = {name: Node(name, "idle") for name in self.names}
        self._comments = dict.fromkeys(self.names, "")
        self._away: dict[ClusterEffect, SimulatedFault] = {}
        self._out = 0
        self._out_since = 0.0
        self.out_s: dict[int, float] = {}
        """For how many seconds 0, 1, 2 … nodes were out of service or broken at once."""

    # -- the part of Slurm's port that the rules use --------------------------------------------------------------

    def nodes(self, names: Sequence[str] = ()) -> Sequence[Node]:
        return [self._nodes[name] for name in names] if names else list(self._nodes.values())

    def update_nodes(self, names: Sequence[str], update: NodeUpdate, reason: str = "") -> None:
        for name in names:
            node = self._nodes[name]
            if update == "resume":
                self._nodes[name] = Node(name, "idle")
            elif update == "down":
                self._nodes[name] = replace(node, state="down", reason=reason, reason_at=self._loop.time())
            else:
                drained = node.flags | {"drain"}
                self._nodes[name] = replace(node, flags=drained, reason=reason, reason_at=self._loop.time())

    def comments(self, names: Sequence[str] = ()) -> Mapping[str, str]:
        return {name: self._comments[name] for name in names or self.names}

    def set_comment(self, name: str, text: str) -> None:
        self._comments[name] = text

    # -- what all nodes need -----------------------------------------------------------------------------------------

    def goes_away(self, what: ClusterEffect, fault: SimulatedFault) -> None:
        """Storage or controller do not answer until the end of ``fault``."""
        before = self._away.get(what)
        if before is None or before.end_s < fault.end_s:
            self._away[what] = fault

    def away(self, what: ClusterEffect) -> tuple[float, str]:
        """For how many seconds more ``what`` does not answer, and the kind of that fault; 0 and "" if it does."""
        fault = self._away.get(what)
        left_s = fault.end_s - self._loop.time() if fault is not None else 0.0
        return (left_s, fault.kind) if fault is not None and left_s > 0 else (0.0, "")

    # -- faults and repairs ------------------------------------------------------------------------------------------

    def usable(self, *, but: Collection[str] = ()) -> list[str]:
        """The nodes on which Slurm would start a job. One that is broken may be among them, if nobody took it out."""
        return [name for name, node in self._nodes.items() if node.usable and name not in but]

    def breaks(self, name: str, fault: SimulatedFault) -> None:
        """``fault`` begins. A node that lives is drained by its agent, if the rules let it."""
        self.broken[name] = fault
        if fault.effect == "lost":
            self.update_nodes([name], "down", DOWN)
        elif not self._nodes[name].out_of_service:
            self._drain(name, fault)
        self._count()

    def _drain(self, name: str, fault: SimulatedFault) -> None:
        """The actions of the agent of ``name``, repeated when Slurm answers."""
        if self.broken.get(name) is not fault:
            return
        if (left_s := self.away("controller")[0]) > 0:
            self._loop.later(left_s, lambda: self._drain(name, fault))
            return
        try:
            ownership.drain(self, [name], ownership.reason(fault.kind), self._rules, now=self._loop.time())
        except ownership.Refused:
            self.drains_refused += 1

    def repaired(self, name: str) -> None:
        """Its fault is over. What opsd holds goes back by its rules, and by a person if those refuse."""
        del self.broken[name]
        node = self._nodes[name]
        if node.reason == DOWN:
            self.update_nodes([name], "resume")
        elif node.out_of_service:
            self._give_back(name)
        self._count()
        if name not in self.broken and self._nodes[name].usable:
            self._returned(name)

    def _give_back(self, name: str) -> None:
        if (left_s := self.away("controller")[0]) > 0:
            self._loop.later(left_s, lambda: self._given_back_late(name))
            return
        now = self._loop.time()
        try:
            ownership.give_back(self, [name], {name: PreflightResult(now, True)}, self._rules, now=now)
        except ownership.Refused:
            self._loop.later(self._person_s, lambda: self._forced_back(name))

    def _given_back_late(self, name: str) -> None:
        if name in self.broken or not self._nodes[name].out_of_service:
            return
        self._give_back(name)
        self._count()
        if self._nodes[name].usable:
            self._returned(name)

    def _forced_back(self, name: str) -> None:
        if name in self.broken:
            return
        if (left_s := self.away("controller")[0]) > 0:
            self._loop.later(left_s, lambda: self._forced_back(name))
            return
        ownership.give_back(self, [name], {}, self._rules, force=True, now=self._loop.time())
        self._count()
        self._returned(name)

    def _count(self) -> None:
        self.settle()
        self._out = sum(name in self.broken or not node.usable for name, node in self._nodes.items())

    def settle(self) -> None:
        """Take the time until now into account."""
        now = self._loop.time()
        self.out_s[self._out] = self.out_s.get(self._out, 0.0) + now - self._out_since
        self._out_since = now
