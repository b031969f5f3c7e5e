"""Takes this node from one generation to the next: ends the old ranks, reports readiness, starts the new ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from opsd import exitcodes
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.group import Group
from opsd.launch.claims.messages import Begun, Ready
from opsd.launch.claims.peers import highest
from opsd.launch.ranks.ranks import Recovery
from opsd.launch.ranks.settings import Assignment
from opsd.launch.run.messages import CODEC, Waiting
from opsd.launch.run.readiness import Readiness
from opsd.launch.run.shutdown import Shutdown
from opsd.launch.run.supervisor import Supervisor
from opsd.ports import ReservedPort


class GenerationChange:
    """Of one launcher. ``placed`` is called whenever this node has got its place.

    ``port`` is MASTER_PORT if this is the first node, None for a free port each time.
    """

    def __init__(
        self,
        node: Supervisor,
        group: Group,
        readiness: Readiness,
        shutdown: Shutdown,
        *,
        port: int | None,
        placed: Callable[[], None],
    ) -> None:
        self.plan: Plan | None = None
        """The newest plan that has begun."""
        self._node = node
        self._group = group
        self._readiness = readiness
        self._shutdown = shutdown
        self._port = port
        self._reserved: ReservedPort | None = None
        self._placed = placed
        self._proposed: Plan | None = None
        self._noticed = 0.0

    @property
    def between(self) -> bool:
        """True while a plan is claimed and has not begun."""
        return self._proposed is not None

    @property
    def at_work(self) -> bool:
        """Whether this node has ranks in the plan."""
        return self.plan is not None and self._name in self.plan.slots

    @property
    def first_rank(self) -> int:
        """The first rank of this node, 0 if it has none."""
        plan = self._proposed or self.plan
        return 0 if plan is None or self._name not in plan.slots else _rank_offset(plan, self._name)

    @property
    def _name(self) -> str:
        return self._group.own.name

    def prepare(self, plan: Plan) -> None:
        """End the ranks of the previous generation, then report readiness."""
        self._proposed = plan
        runs = self._node.generation.number == plan.generation and not self._node.ending
        if plan.payload.get("keep") and runs:
            self._ready(plan)
            return
        self._noticed = time.monotonic() - float(plan.payload.get("noticed_s", 0.0))
        if self._node.generation.ranks:
            self._node.set_state("restarting")
        self._node.end(lambda: self._prepared(plan))

    def _prepared(self, plan: Plan) -> None:
        if not plan.slots:
            self._node.set_state("waiting")
        if not plan.payload.get("first") and not self.at_work and self._name in plan.slots:
            self._readiness.before(lambda: self._ready(plan))
        else:
            self._ready(plan)

    def _ready(self, plan: Plan) -> None:
        if self._proposed is None or self._proposed.number != plan.number:
            return
        try:
            port = self._port or self._reserve_port()
        except OSError as error:
            self._shutdown.leave(exitcodes.FAILED, str(error))
            return
        progress = self._node.progress
        self._group.ready(plan.number, Ready(port, progress.furthest, progress.committed))

    def _reserve_port(self) -> int:
        """Another than that of the last generation, whose ranks may still be bound to it."""
        self._reserved = ReservedPort()
        return self._reserved.number

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        """Start this node's ranks, if it has any."""
        self.plan, self._proposed = plan, None
        if begun is None:
            self._node.end(self._tell_waiting)
            return
        progress = self._node.progress
        progress.furthest = highest((progress.furthest, begun.furthest))
        progress.committed = highest((progress.committed, begun.committed))
        if not self.at_work:
            self._node.end(lambda: self._stand_by(plan))
        else:
            if not plan.payload["keep"]:
                self._start(plan, begun)
            self._placed()

    def _tell_waiting(self) -> None:
        """The others have begun, or go on, without the ranks of this node."""
        assert self.plan is not None
        self._group.tell_leader(CODEC.encode(Waiting(self.plan.generation, 0.0)))

    def _stand_by(self, plan: Plan) -> None:
        if self.plan is plan:
            self._node.stand_by(plan.generation)
            self._readiness.tell()
            self._placed()

    def _start(self, plan: Plan, begun: Begun) -> None:
        if not plan.payload["first"]:
            self._node.progress.recovery = Recovery(self._noticed, self._node.progress.furthest)
        sizes = [plan.sizes[name] for name in plan.slots]
        place = plan.slots.index(self._name)
        assignment = Assignment(
            place, len(sizes), _rank_offset(plan, self._name), sizes[place], sum(sizes), begun.address, begun.port
        )
        self._node.start(plan.number, assignment, int(plan.payload["restarts"]))


def _rank_offset(plan: Plan, name: str) -> int:
    return sum(plan.sizes[before] for before in plan.slots[: plan.slots.index(name)])
