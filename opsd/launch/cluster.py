"""A launcher with fellows: runs the ranks that the plan gives this node, and is the head when it is elected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opsd import exitcodes
from opsd.launch.claims import Claims
from opsd.launch.control import Request
from opsd.launch.failure import Failure
from opsd.launch.farewell import Farewell
from opsd.launch.hang import Hang
from opsd.launch.head import Head
from opsd.launch.local_hang import LocalHang
from opsd.launch.loop import Timer
from opsd.launch.membership import Assignment, free_port
from opsd.launch.messages import say
from opsd.launch.outside import Fence, Job
from opsd.launch.placement import generation_of
from opsd.launch.postmortem import report_exit
from opsd.launch.quorum.port import Member, Message, Plan, Quorum
from opsd.launch.readiness import Readiness
from opsd.launch.reports import BadReport, failed_to_json, failure_to_json
from opsd.launch.requests import answer
from opsd.launch.run_control import CONTROL, Failed
from opsd.launch.run_log import OF_ONE_LAUNCHER
from opsd.launch.supervisor import Supervisor
from opsd.launch.watch import Recovery

PROGRESS_S = 1.0
READINESS_S = 30.0
"""How often a node that stands by looks whether it still may."""
LAST_WORDS_S = 1.0
"""How long a launcher that must not be used stays to say so."""
UNBEGUN_S = 5.0
"""How long a launcher that is to stop before its run has begun looks for a head to tell."""
TIE_S = 4.0
"""How long a half that has not most of the nodes at work leaves the claim to the other."""


class ClusterRun:
    """The ``RunControl`` of a launcher with fellows, and the ``Listener`` of their agreement.

    ``new_head`` makes the head's part when this launcher is elected. Without a majority within reach the launcher ends
    after ``join_s`` seconds at the beginning, and after ``isolated_s`` later. ``ready`` says why this node must not
    take the place of another, "" if it may; a ``guest``, whose node is not the job's, then ends. Its signals are about
    its own job, not about the run. A run ``waits`` for nodes if it has too few.
    """

    def __init__(
        self,
        node: Supervisor,
        quorum: Quorum,
        *,
        new_head: Callable[[Callable[[tuple[str, ...], tuple[str, ...]], None]], Head],
        fence: Fence,
        job: Job,
        ready: Callable[[], str],
        guest: bool = False,
        waits: bool = False,
        join_s: float = 600.0,
        isolated_s: float = 60.0,
    ) -> None:
        self._node = node
        self._quorum = quorum
        self._new_head = new_head
        self._claims = Claims(node.loop, fence, lambda: self._head, self._leave)
        self._guest = guest
        self._waits = waits
        self._farewell = Farewell(node, quorum, job)
        self._hang = LocalHang(node)
        self._readiness = Readiness(node.loop, quorum, ready, self._not_ready if guest else lambda why: None)
        self._join_s = join_s
        self._isolated_s = isolated_s
        self._head: Head | None = None
        self._plan: Plan | None = None
        self._answers: Mapping[str, Message] = {}
        self._proposed: Plan | None = None
        self._noticed = 0.0
        self._finished = False
        self._told_to_stop = ""
        self._called_back = ""
        self._alone: Timer | None = None

    # -- the launcher's side -------------------------------------------------------------------------------------

    def start_run(self) -> None:
        """Look for the others."""
        self._node.events.relay = self._relay
        try:
            self._quorum.start(self)
        except OSError as error:
            own = self._quorum.own
            why = error.strerror or str(error)
            self._node.finish(
                exitcodes.FAILED, f"cannot listen at {own.address}:{own.port}: {why}; choose with --port and --nodes"
            )
            return
        self._node.loop.every(PROGRESS_S, self._tell_progress)
        self._node.loop.every(READINESS_S, self._tell_readiness)
        self._claims.watch()
        self._node.loop.later(self._join_s, self._nobody_came)

    def _nobody_came(self) -> None:
        if self._plan is None and self._quorum.head is None:
            self._leave(exitcodes.FAILED, f"no majority of the launchers has come within {self._join_s:g} s")

    def cannot_start(self, reason: str) -> None:
        """Report it as the failure of this node's first rank."""
        rank = self._assignment(self._plan).rank_offset if self._plan is not None else 0
        failure = Failure(rank, reason, "environment", time.time())
        self._node.end(lambda: self._tell("failed", failures=[failure_to_json(failure, time.time())]))

    def failed(self, found: Sequence[Failed]) -> None:
        """Let the head judge."""
        for failure, rank in found:
            report_exit(self._node.events, rank, failure, culprit=failure.kind != "communication")
        self._tell("failed", failures=failed_to_json(found, time.time()))

    def hung(self, hang: Hang) -> None:
        """Let the head look whether a rank of another node is behind it."""
        if self._hang.seen(hang):
            self._tell("hung")

    def ended(self) -> None:
        """This node is done; the others may not be."""
        self._tell("ended", told=self._node.stopping)

    def asked_to_stop(self, by: str) -> None:
        """Stop here at once, and have all others do so: the signal may have reached this node only."""
        if self._finished:
            self._farewell.hasten()
            return
        if self._guest and by != CONTROL:
            self._called_back = by
            self._make_way()
            return
        if self._told_to_stop or not self._node.stopping:
            self._node.stop(by)
        self._told_to_stop = self._told_to_stop or by
        self._quorum.tell_head({"kind": "stop", "by": by})
        if not self._node.generation.running:
            limit = self._node.settings.stop_timeout_s if self._plan is not None else UNBEGUN_S
            self._node.loop.later(limit, lambda: self._leave(exitcodes.REQUEUE, f"stopped after {by}"))

    def _make_way(self) -> None:
        """If the node of this guest is wanted back: go, once another has taken its place at a step boundary."""
        if not self._called_back:
            return
        why = f"its own job ends ({self._called_back})"
        if self._at_work:
            self._tell("leaving", reason=why)
        else:
            self._node.end(lambda: self._leave(exitcodes.INTERRUPTED, f"{self._quorum.own.name} goes: {why}"))

    def stop_too_slow(self, reason: str) -> None:
        """Kill the ranks of this node; the head ends the run, or goes on from the last checkpoint."""
        self._node.end(lambda: self._tell("late", reason=reason, told=self._node.stopping))

    def interrupted(self) -> None:
        """End this launcher; the others go on without it, or end by their own SIGINT."""
        self._node.end(lambda: self._leave(exitcodes.INTERRUPTED, "interrupted by SIGINT"))

    def request(self, request: Request) -> Request:
        """Answer ``status``, ``restart`` and ``swap``."""
        between = self._proposed is not None
        return answer(request, self._plan, self._quorum.head, between, self._tell, waits=self._waits)

    def close(self) -> None:
        """Say goodbye."""
        self._quorum.leave()

    # -- the agreement's side ------------------------------------------------------------------------------------

    def head_changed(self, head: str | None) -> None:
        """Become the head, or tell the new one what it has to know."""
        if self._finished:
            return
        mine = head == self._quorum.own.name
        if self._head is not None and not mine:
            self._head.retire()
            self._head = None
        if mine and self._head is None:
            self._head = self._new_head(self._farewell.over)
            self._head.take_over(self._quorum.plan, self._answers)
        if head is None:
            return
        self._not_alone()
        if self._told_to_stop:
            self._quorum.tell_head({"kind": "stop", "by": self._told_to_stop})
        if self._plan is not None:
            self._tell_progress()
            if not self._node.generation.running and self._quorum.own.name in self._plan.slots:
                self._tell("ended" if self._node.done else "waiting", told=self._node.stopping)
            self._make_way()

    def prepare(self, plan: Plan) -> None:
        """End the ranks of the generation before, then be ready."""
        if self._finished:
            return
        self._proposed = plan
        if plan.payload["keep"]:
            self._ready(plan)
            return
        self._noticed = time.monotonic() - float(plan.payload["noticed_s"])
        if self._node.generation.ranks:
            self._node.set_state("restarting")
        self._node.end(lambda: self._prepared(plan))

    def _prepared(self, plan: Plan) -> None:
        if not plan.payload["first"] and not self._at_work and self._quorum.own.name in plan.slots:
            self._readiness.before(lambda: self._secured(plan))
        else:
            self._secured(plan)

    @property
    def _at_work(self) -> bool:
        return self._plan is not None and self._quorum.own.name in self._plan.slots

    def _tell_readiness(self) -> None:
        if self._plan is not None and not self._at_work:
            self._readiness.tell()

    def _not_ready(self, why: str) -> None:
        """Give the node back to the pool, once the head has heard why."""
        self._node.loop.later(LAST_WORDS_S, lambda: self._leave(exitcodes.FAILED, f"not ready as a spare: {why}"))

    def _secured(self, plan: Plan) -> None:
        if self._head is None:
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
        answer = {"port": port, "local_size": self._node.settings.local_size, **self._progress()}
        self._quorum.ready(plan.number, answer)

    def begin(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        """Start this node's ranks, if it has any."""
        came, self._plan = self._plan is None, plan
        self._answers, self._proposed = answers, None
        progress = self._node.progress
        progress.furthest = highest(answer["furthest"] for answer in answers.values())
        progress.committed = highest(answer["committed"] for answer in answers.values())
        if self._head is not None:
            self._head.began(plan, answers)
        if plan.payload["keep"] and self._node.generation.number == generation_of(plan) and not came:
            self._make_way()
            return
        if self._node.generation.running:
            # The others have gone on without this node, which has not been asked.
            self._node.end(lambda: self._take_part(plan))
        else:
            self._take_part(plan)

    def _take_part(self, plan: Plan) -> None:
        if self._plan is not plan:
            return
        if self._quorum.own.name not in plan.slots:
            self._node.stand_by(generation_of(plan))
            self._tell_readiness()
            self._make_way()
            return
        if plan.payload["keep"]:
            self._tell("waiting", told="")
            return
        if not plan.payload["first"]:
            self._node.progress.recovery = Recovery(self._noticed, self._node.progress.furthest)
        self._node.start(plan.number, self._assignment(plan), int(plan.payload["restarts"]))
        self._make_way()

    def _assignment(self, plan: Plan) -> Assignment:
        addresses = {member.name: member.address for member in plan.members}
        sizes = [int(self._answers[name]["local_size"]) for name in plan.slots]
        first, place = plan.slots[0], plan.slots.index(self._quorum.own.name)
        return Assignment(
            place, len(sizes), sum(sizes[:place]), sizes[place], sum(sizes),
            addresses[first], int(self._answers[first]["port"]),
        )  # fmt: skip

    def isolated(self) -> None:
        """End the ranks here, and see whether anybody goes on without this side."""
        if self._plan is None or self._finished:
            return
        say("fewer than half of the launchers are within reach; ending the ranks here")
        self._proposed = None
        self._node.end(lambda: self._node.set_state("waiting"))
        self._not_alone()
        self._alone = self._node.loop.later(self._isolated_s, self._give_up)

    def _not_alone(self) -> None:
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def _give_up(self) -> None:
        self._leave(exitcodes.REQUEUE, f"no majority of the launchers within reach for {self._isolated_s:g} s")

    def tied(self, absent: tuple[str, ...]) -> None:
        """Go on if the other half has not claimed the next generation, and then cannot.

        The half with most of those at work, or with the first of them, comes first.
        """
        plan = self._plan
        if plan is None or self._finished:
            self._quorum.decide_tie(False)
            return
        here = [name for name in plan.slots if name not in absent]
        first = 2 * len(here) > len(plan.slots) or (2 * len(here) == len(plan.slots) and plan.slots[0] in here)
        delay_s = 0.0 if first else TIE_S
        number, decide = plan.number + 1, self._quorum.decide_tie
        self._node.loop.later(delay_s, lambda: self._claims.claim_tie(number, decide))

    def joined(self, member: Member) -> None:
        """Let the head know."""
        if self._head is not None:
            self._head.joined(member)

    def lost(self, name: str, silent_s: float) -> None:
        """Let the head act."""
        if self._head is not None:
            self._head.lost(name, silent_s)

    def received(self, sender: str, message: Message) -> None:
        """Obey the head; as the head, decide."""
        try:
            if not self._obey(message) and self._head is not None:
                self._head.received(sender, message)
        except (BadReport, KeyError, TypeError, ValueError) as error:
            say(f"a message of {sender} is ignored: {error!r}")

    def _obey(self, message: Message) -> bool:
        kind = message.get("kind")
        if kind == "order_stop":
            if not self._node.stopping:
                self._node.stop(str(message["by"]))
        elif kind == "finish":
            self._finish(int(message["code"]), str(message["reason"]))
        elif kind == "standings?":
            if message["generation"] == self._node.generation.number and self._node.generation.running:
                self._tell("standings", **self._hang.report())
        elif kind == "hang":
            self._hang.judged(message["fields"], int(message["score"]))
        else:
            return False
        return True

    # -- telling -------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, **fields: Any) -> None:
        self._quorum.tell_head({"kind": kind, "generation": self._node.generation.number, **self._progress(), **fields})

    def _progress(self) -> dict[str, int | None]:
        return {"furthest": self._node.progress.furthest, "committed": self._node.progress.committed}

    def _tell_progress(self) -> None:
        if self._plan is not None and self._plan.slots[0] == self._quorum.own.name:
            self._tell("progress")

    def _relay(self, record: dict[str, object]) -> None:
        if record["event"] not in OF_ONE_LAUNCHER:
            age_s = time.time() - float(str(record["t"]))
            self._quorum.tell_head({"kind": "event", "record": record, "age_s": age_s})

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self, code: int, reason: str) -> None:
        if self._finished:
            return
        self._finished = True
        self._node.end(lambda: self._leave(code, reason), gently=code == exitcodes.OK)

    def _leave(self, code: int, reason: str) -> None:
        self._finished = True
        self._farewell.leave(code, reason)


def highest(steps: Iterable[int | None]) -> int | None:
    """The highest step that somebody knows, None if nobody does."""
    return max((step for step in steps if step is not None), default=None)
