"""A launcher with fellows: tells the head what happens on its node and obeys it, and is the head when elected."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from opsd import exitcodes
from opsd.launch.claims.outside import Fence, Job
from opsd.launch.hangs.hang import Hang
from opsd.launch.io.control import Request
from opsd.launch.io.member import Member, Message
from opsd.launch.io.messages import say
from opsd.launch.quorum.port import Plan, Quorum
from opsd.launch.ranks.failure import Failure
from opsd.launch.ranks.postmortem import report_exit
from opsd.launch.run.claims import Claims
from opsd.launch.run.farewell import Farewell
from opsd.launch.run.head import Head
from opsd.launch.run.isolation import Isolation
from opsd.launch.run.local_hang import LocalHang
from opsd.launch.run.readiness import Readiness
from opsd.launch.run.reports import BadReport, failed_to_json, failure_to_json
from opsd.launch.run.requests import answer
from opsd.launch.run.run_control import CONTROL, Failed
from opsd.launch.run.supervisor import Supervisor
from opsd.launch.run.teller import Teller
from opsd.launch.run.turnover import Turnover

PROGRESS_S = 1.0
READINESS_S = 30.0
"""How often a node that stands by looks whether it still may."""
LAST_WORDS_S = 1.0
"""How long a launcher that must not be used stays to say so."""
UNBEGUN_S = 5.0
"""How long a launcher that is to stop before its run has begun looks for a head to tell."""


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
        self._teller = Teller(node, quorum)
        self._isolation = Isolation(node, quorum, self._claims, self._leave, isolated_s)
        self._turnover = Turnover(
            node, quorum, self._claims, self._readiness, self._teller,
            head=lambda: self._head, placed=self._make_way, leave=self._leave,
        )  # fmt: skip
        self._join_s = join_s
        self._head: Head | None = None
        self._finished = False
        self._told_to_stop = ""
        self._called_back = ""

    # -- the launcher's side -------------------------------------------------------------------------------------

    def start_run(self) -> None:
        """Look for the others."""
        self._node.events.relay = self._teller.relay
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
        if self._turnover.plan is None and self._quorum.head is None:
            self._leave(exitcodes.FAILED, f"no majority of the launchers has come within {self._join_s:g} s")

    def cannot_start(self, reason: str) -> None:
        """Report it as the failure of this node's first rank."""
        failure = Failure(self._turnover.first_rank, reason, "environment", time.time())
        self._node.end(lambda: self._teller.tell("failed", failures=[failure_to_json(failure, time.time())]))

    def failed(self, found: Sequence[Failed]) -> None:
        """Let the head judge."""
        for failure, rank in found:
            report_exit(self._node.events, rank, failure, culprit=failure.kind != "communication")
        self._teller.tell("failed", failures=failed_to_json(found, time.time()))

    def hung(self, hang: Hang) -> None:
        """Let the head look whether a rank of another node is behind it."""
        if self._hang.seen(hang):
            self._teller.tell("hung")

    def ended(self) -> None:
        """This node is done; the others may not be."""
        self._teller.tell("ended", told=self._node.stopping)

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
        self._teller.tell_stop(by)
        if not self._node.generation.running:
            limit = self._node.settings.stop_timeout_s if self._turnover.plan is not None else UNBEGUN_S
            self._node.loop.later(limit, lambda: self._leave(exitcodes.REQUEUE, f"stopped after {by}"))

    def _make_way(self) -> None:
        """If the node of this guest is wanted back: go, once another has taken its place at a step boundary."""
        if not self._called_back:
            return
        why = f"its own job ends ({self._called_back})"
        if self._turnover.at_work:
            self._teller.tell("leaving", reason=why)
        else:
            self._node.end(lambda: self._leave(exitcodes.INTERRUPTED, f"{self._quorum.own.name} goes: {why}"))

    def stop_too_slow(self, reason: str) -> None:
        """Kill the ranks of this node; the head ends the run, or goes on from the last checkpoint."""
        self._node.end(lambda: self._teller.tell("late", reason=reason, told=self._node.stopping))

    def interrupted(self) -> None:
        """End this launcher; the others go on without it, or end by their own SIGINT."""
        self._node.end(lambda: self._leave(exitcodes.INTERRUPTED, "interrupted by SIGINT"))

    def request(self, request: Request) -> Request:
        """Answer ``status``, ``restart`` and ``swap``."""
        turnover = self._turnover
        return answer(request, turnover.plan, self._quorum.head, turnover.between, self._teller.tell, waits=self._waits)

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
            self._head.take_over(self._quorum.plan, self._turnover.answers)
        if head is None:
            return
        gone_s = self._isolation.end()
        if self._told_to_stop:
            self._teller.tell_stop(self._told_to_stop)
        if self._turnover.plan is not None:
            self._tell_progress()
            if not self._node.generation.running and self._turnover.at_work:
                self._teller.tell("ended" if self._node.done else "waiting", told=self._node.stopping, gone_s=gone_s)
            self._make_way()

    def _tell_progress(self) -> None:
        plan = self._turnover.plan
        if plan is not None and plan.slots[0] == self._quorum.own.name:
            self._teller.tell("progress")

    def prepare(self, plan: Plan) -> None:
        """Leave the generation before."""
        if not self._finished:
            self._turnover.prepare(plan)

    def begin(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        """Take the place that ``plan`` gives this node."""
        self._turnover.begin(plan, answers)

    def _tell_readiness(self) -> None:
        if self._turnover.plan is not None and not self._turnover.at_work:
            self._readiness.tell()

    def _not_ready(self, why: str) -> None:
        """Give the node back to the pool, once the head has heard why."""
        self._node.loop.later(LAST_WORDS_S, lambda: self._leave(exitcodes.FAILED, f"not ready as a spare: {why}"))

    def isolated(self) -> None:
        """Run no ranks that others may have replaced."""
        if self._turnover.plan is None or self._finished:
            return
        self._turnover.abandon()
        self._isolation.begin()

    def tied(self, absent: tuple[str, ...]) -> None:
        """Only one half may go on."""
        if self._turnover.plan is None or self._finished:
            self._quorum.decide_tie(False)
        else:
            self._isolation.break_tie(self._turnover.plan, absent)

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
                self._teller.tell("standings", **self._hang.report())
        elif kind == "hang":
            self._hang.judged(message["fields"], int(message["score"]))
        else:
            return False
        return True

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self, code: int, reason: str) -> None:
        if self._finished:
            return
        self._finished = True
        self._node.end(lambda: self._leave(code, reason), gently=code == exitcodes.OK)

    def _leave(self, code: int, reason: str) -> None:
        self._finished = True
        self._farewell.leave(code, reason)
