"""Takes this node from one generation to the next: ends the ranks of the old one, is ready, starts those of the new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from opsd import exitcodes
from opsd.launch.io.member import Message
from opsd.launch.quorum.port import Plan, Quorum
from opsd.launch.ranks.membership import Assignment, free_port
from opsd.launch.ranks.watch import Recovery
from opsd.launch.run.claims import Claims
from opsd.launch.run.head import Head
from opsd.launch.run.placement import generation_of
from opsd.launch.run.readiness import Readiness
from opsd.launch.run.supervisor import Supervisor
from opsd.launch.run.teller import Teller


class Turnover:
    """Of one launcher. ``head`` is its part as the head while it is that, ``leave`` ends it.

    ``placed`` is called whenever this node has got its place in a generation.
    """

    def __init__(
        self,
        node: Supervisor,
        quorum: Quorum,
        claims: Claims,
        readiness: Readiness,
        teller: Teller,
        *,
        head: Callable[[], Head | None],
        placed: Callable[[], None],
        leave: Callable[[int, str], None],
    ) -> None:
        self.plan: Plan | None = None
        """The newest that has begun."""
        self.answers: Mapping[str, Message] = {}
        """What its members have said when they were ready."""
        self._node = node
        self._quorum = quorum
        self._claims = claims
        self._readiness = readiness
        self._teller = teller
        self._head = head
        self._placed = placed
        self._leave = leave
        self._proposed: Plan | None = None
        self._noticed = 0.0

    @property
    def between(self) -> bool:
        """True while a plan is proposed and has not begun."""
        return self._proposed is not None

    @property
    def at_work(self) -> bool:
        """Whether this node has ranks in the plan."""
        return self.plan is not None and self._name in self.plan.slots

    @property
    def first_rank(self) -> int:
        """Of this node, 0 before the first plan."""
        return self._assignment(self.plan).rank_offset if self.plan is not None else 0

    @property
    def _name(self) -> str:
        return self._quorum.own.name

    def abandon(self) -> None:
        """What is proposed is not to begin here."""
        self._proposed = None

    def prepare(self, plan: Plan) -> None:
        """End the ranks of the generation before, then be ready."""
        self._proposed = plan
        if plan.payload["keep"]:
            self._ready(plan)
            return
        self._noticed = time.monotonic() - float(plan.payload["noticed_s"])
        if self._node.generation.ranks:
            self._node.set_state("restarting")
        self._node.end(lambda: self._prepared(plan))

    def _prepared(self, plan: Plan) -> None:
        if not plan.payload["first"] and not self.at_work and self._name in plan.slots:
            self._readiness.before(lambda: self._secure(plan))
        else:
            self._secure(plan)

    def _secure(self, plan: Plan) -> None:
        if self._head() is None:
            self._ready(plan)
        else:
            self._claims.claim(plan.number, lambda: self._ready(plan))

    def _ready(self, plan: Plan) -> None:
        if self._proposed is None or self._proposed.number != plan.number:
            return
        try:
            port = free_port()
        except OSError as error:
            self._leave(exitcodes.FAILED, str(error))
            return
        answer = {"port": port, "local_size": self._node.settings.local_size, **self._teller.progress()}
        self._quorum.ready(plan.number, answer)

    def begin(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        """Start this node's ranks, if it has any."""
        came, self.plan = self.plan is None, plan
        self.answers, self._proposed = answers, None
        progress = self._node.progress
        progress.furthest = highest(answer["furthest"] for answer in answers.values())
        progress.committed = highest(answer["committed"] for answer in answers.values())
        head = self._head()
        if head is not None:
            head.began(plan, answers)
        if plan.payload["keep"] and self._node.generation.number == generation_of(plan) and not came:
            self._placed()
        elif self._node.generation.running:
            # The others have gone on without this node, which has not been asked.
            self._node.end(lambda: self._take_part(plan))
        else:
            self._take_part(plan)

    def _take_part(self, plan: Plan) -> None:
        if self.plan is not plan:
            return
        if not self.at_work:
            self._node.stand_by(generation_of(plan))
            self._readiness.tell()
            self._placed()
        elif plan.payload["keep"]:
            self._teller.tell("waiting", told="", gone_s=0.0)
        else:
            self._start(plan)
            self._placed()

    def _start(self, plan: Plan) -> None:
        if not plan.payload["first"]:
            self._node.progress.recovery = Recovery(self._noticed, self._node.progress.furthest)
        self._node.start(plan.number, self._assignment(plan), int(plan.payload["restarts"]))

    def _assignment(self, plan: Plan) -> Assignment:
        addresses = {member.name: member.address for member in plan.members}
        sizes = [int(self.answers[name]["local_size"]) for name in plan.slots]
        first, place = plan.slots[0], plan.slots.index(self._name)
        return Assignment(
            place, len(sizes), sum(sizes[:place]), sizes[place], sum(sizes),
            addresses[first], int(self.answers[first]["port"]),
        )  # fmt: skip


def highest(steps: Iterable[int | None]) -> int | None:
    """The highest step that somebody knows, None if nobody does."""
    return max((step for step in steps if step is not None), default=None)
