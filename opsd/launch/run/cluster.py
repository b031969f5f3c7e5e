"""A launcher's part in the run: tells the head what happens on its node and obeys it, and is the head when it leads.

A run on one node is the same with one launcher, which is the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

from opsd import exitcodes
from opsd.checkpoints.claims import End
from opsd.launch.claims.folder import LASTING
from opsd.launch.claims.messages import Begun
from opsd.launch.claims.plan import Plan
from opsd.launch.claims.port import Body, Group
from opsd.launch.hangs.hang import Hang
from opsd.launch.io.control import Request
from opsd.launch.io.loop import Timer
from opsd.launch.io.member import Member
from opsd.launch.io.messages import say
from opsd.launch.io.protocol import ProtocolError
from opsd.launch.ranks.failure import Failure, first_cause
from opsd.launch.ranks.postmortem import report_exit
from opsd.launch.run import messages
from opsd.launch.run.farewell import Farewell, Job
from opsd.launch.run.head import Head
from opsd.launch.run.local_hang import LocalHang
from opsd.launch.run.messages import CODEC, Stop, Told, Why
from opsd.launch.run.placement import Shape, place
from opsd.launch.run.readiness import Readiness
from opsd.launch.run.reports import to_ages
from opsd.launch.run.requests import answer
from opsd.launch.run.run_control import CONTROL, Failed
from opsd.launch.run.supervisor import Supervisor
from opsd.launch.run.teller import Teller
from opsd.launch.run.turnover import Turnover

PROGRESS_S, WATCH_S = 1.0, 0.25
READINESS_S = 30.0
"""How often a node that stands by looks whether it still may."""
LAST_WORDS_S = 1.0
"""How long a launcher that must not be used stays to say so."""
UNBEGUN_S = 5.0
"""How long a launcher that is to stop before its run has begun looks for a head to tell."""
LASTING_S, SILENT_S = 30.0, 1800.0
"""How long the run's folder may be unusable in a way that does not go away by itself, and in any way."""
END_S = 20.0
"""How long the end of the run waits for the folder to take it."""


class ClusterRun:
    """The ``RunControl`` of a launcher, and the ``Listener`` of its group.

    ``new_head`` makes the head's part when this launcher leads. Without a head within reach the launcher ends after
    ``join_s`` seconds of ``shape`` at the beginning, and after ``isolated_s`` later. ``ready`` says why this node must
    not take the place of another, "" if it may; a ``guest``, whose node is not the job's, then ends. Its signals are
    about its own job, not about the run.
    """

    def __init__(
        self,
        node: Supervisor,
        group: Group,
        shape: Shape,
        *,
        new_head: Callable[[Callable[[int, str, tuple[str, ...], tuple[str, ...]], None]], Head],
        job: Job,
        ready: Callable[[], str],
        guest: bool = False,
        port: int | None = None,
        isolated_s: float = 60.0,
    ) -> None:
        self._node = node
        self._group = group
        self._shape = shape
        self._new_head = new_head
        self._guest = guest
        self._farewell = Farewell(node, group, job)
        self._hang = LocalHang(node)
        self._readiness = Readiness(node.loop, group, ready, self._not_ready if guest else lambda why: None)
        self._teller = Teller(node, group)
        self._turnover = Turnover(
            node, group, self._readiness, self._teller, port=port, placed=self._make_way, leave=self._leave
        )
        self._isolated_s = isolated_s
        self._alone: Timer | None = None
        self._alone_since = self._gone_s = 0.0
        self._head: Head | None = None
        self._finished = False
        self._stop: Stop | None = None
        self._wanted: Stop | None = None
        self._ordered: messages.StopOrdered | None = None
        self._failures: list[Failed] = []
        self._called_back = ""
        self._unwell_s = 0.0

    # -- the launcher's side -------------------------------------------------------------------------------------

    def start_run(self) -> None:
        """Look for the others."""
        self._node.events.relay = self._teller.relay
        try:
            self._group.start(self)
        except OSError as error:
            own = self._group.own
            why = error.strerror or str(error)
            self._node.finish(
                exitcodes.FAILED, f"cannot listen at {own.address}:{own.port}: {why}; choose with --port and --nodes"
            )
            return
        self._node.loop.every(PROGRESS_S, self._tell_progress)
        self._node.loop.every(READINESS_S, self._tell_readiness)
        self._node.loop.every(WATCH_S, self._watch_folder)
        self._node.loop.later(self._shape.join_s, self._nobody_came)

    def _nobody_came(self) -> None:
        if self._turnover.plan is None and self._group.head is None:
            limit = f"{self._shape.join_s:g} s"
            self._leave(exitcodes.FAILED, f"fewer launchers than the run needs have come within {limit}")

    def _watch_folder(self) -> None:
        """A run that goes on needs no folder; one that pauses delays a recovery, one that cannot be used ends it."""
        led = self._group.head not in (None, self._group.own.name)
        well = not self._group.replacing and (self._node.generation.running or (led and not self._turnover.between))
        self._unwell_s = 0.0 if well else self._unwell_s + WATCH_S
        error = self._group.folder_error
        lasting = error is not None and error.errno in LASTING
        unbegun = self._turnover.plan is None and not self._turnover.between
        limit_s = 0.0 if lasting and unbegun else LASTING_S if lasting else SILENT_S
        if min(self._group.folder_silent_s, self._unwell_s) > limit_s and not self._finished:
            why = (error.strerror or str(error)) if error is not None else f"no answer for {SILENT_S:g} s"
            self._finish(exitcodes.FAILED, f"the run's folder cannot be used: {why}")

    def cannot_start(self, reason: str) -> None:
        """Report it as the failure of this node's first rank."""
        failure = Failure(self._turnover.first_rank, reason, "environment", 0.0)
        failed = messages.Failed(self._teller.generation, (messages.FailedRank(failure),))
        self._node.end(lambda: self._teller.tell(failed))

    def failed(self, found: Sequence[Failed]) -> None:
        """Let the head judge."""
        cause = first_cause([failure for failure, _ in found])
        for failure, rank in sorted(found, key=lambda pair: pair[0] is not cause):
            named = failure is cause and (failure.kind != "communication" or len(self._group.roster) == 1)
            report_exit(self._node.events, rank, failure, culprit=named)
        self._failures += found
        self._teller.tell_progress()
        self._tell_failures(found)

    def _tell_failures(self, found: Sequence[Failed]) -> None:
        self._teller.tell(messages.Failed(self._teller.generation, to_ages(found, time.time())))

    def hung(self, hang: Hang) -> None:
        """Let the head look whether a rank of another node is behind it."""
        if self._hang.seen(hang):
            self._teller.tell(messages.Hung(self._teller.generation))

    def ended(self) -> None:
        """This node is done; the others may not be."""
        self._teller.tell_progress()
        self._teller.tell(messages.Ended(self._teller.generation, self._told))

    @property
    def _told(self) -> Stop | None:
        """What the ranks here were told to stop for, if they were."""
        return self._stop if self._node.stopping else None

    def asked_to_stop(self, by: str) -> None:
        """Stop here at once, and have all others do so: the signal may have reached this node only."""
        if self._finished:
            self._farewell.hasten()
            return
        if self._guest and by != CONTROL:
            self._called_back = by
            self._make_way()
            return
        stop = Stop(Why.REQUEST) if by == CONTROL else Stop(Why.SIGNAL, by)
        if self._wanted or not self._node.stopping:
            self._stop_ranks(stop)
        self._wanted = self._wanted or stop
        self._teller.tell(messages.StopWanted(stop))
        if not self._node.generation.running:
            limit = self._node.settings.stop_timeout_s if self._turnover.plan is not None else UNBEGUN_S
            self._node.loop.later(limit, lambda: self._leave_idle(f"stopped after {by}"))

    def _leave_idle(self, reason: str) -> None:
        """Leave if nobody has ended the run: ranks that were started meanwhile stop in their own time."""
        if not self._node.generation.running:
            self._leave(exitcodes.REQUEUE, reason)

    def _stop_ranks(self, stop: Stop) -> None:
        self._stop = stop
        self._node.stop(str(stop))

    def _make_way(self) -> None:
        """If the node of this guest is wanted back: go, once another has taken its place at a step boundary."""
        if not self._called_back:
            return
        why = f"its own job ends ({self._called_back})"
        if self._turnover.at_work:
            self._teller.tell(messages.Leaving(self._teller.generation, why))
        else:
            self._node.end(lambda: self._leave(exitcodes.INTERRUPTED, f"{self._group.own.name} goes: {why}"))

    def stop_too_slow(self, reason: str) -> None:
        """Kill the ranks of this node; the head ends the run, or goes on from the last checkpoint.

        Ranks that are being ended are so for the next generation, which waits for what is to be done after that.
        """
        if self._node.ending:
            return
        late = messages.Late(self._teller.generation, reason, self._told)
        self._node.end(lambda: self._teller.tell(late))

    def interrupted(self) -> None:
        """Let the ranks here end of it, then exit; the others go on without them, or end by their own SIGINT."""
        if not self._finished and self._head is not None:
            self._head.retire()
            self._head = None
        self._finished = True
        self._group.leave()
        self._node.interrupt(lambda: self._leave(exitcodes.INTERRUPTED, "interrupted by SIGINT"))

    def request(self, request: Request) -> Request:
        """Answer ``status``, ``restart`` and ``swap``."""
        between = self._turnover.between or self._node.ending or bool(self._node.stopping)
        return answer(
            request, self._group, between=between, generation=self._teller.generation, tell=self._teller.tell,
            waits=self._shape.wait_s > 0,
        )  # fmt: skip

    def close(self) -> None:
        """Say goodbye."""
        self._group.leave()

    # -- the group's side ----------------------------------------------------------------------------------------

    def enough(self, near: Collection[str]) -> bool:
        """Whether a generation could be formed of the nodes ``near``."""
        plan = self._group.plan
        slots, unfit = (plan.slots, plan.payload.get("unfit", ())) if plan is not None else ((), ())
        return place(self._shape, slots, near, unfit) is not None

    def stuck(self) -> bool:
        """Whether the ranks here make no progress, as far as can be seen."""
        return not self._node.generation.running or self._hang.lasts

    def head_changed(self, head: str | None) -> None:
        """Become the head, or tell the new one what it has to know."""
        if self._finished:
            return
        if self._head is not None:
            self._head.retire()
            self._head = None
        if head is None:
            self._begin_to_wait()
            return
        self._gone_s = self._end_waiting()
        if head == self._group.own.name:
            self._head = self._new_head(self._over)
            self._head.take_over()
        self._tell_state()
        if self._turnover.plan is not None:
            self._make_way()

    def _tell_state(self) -> None:
        if self._wanted:
            self._teller.tell(messages.StopWanted(self._wanted))
        plan, node = self._turnover.plan, self._node
        if plan is None:
            return
        self._teller.tell_progress()
        if self._turnover.between or not self._turnover.at_work:
            return
        runs = node.generation.number == plan.generation
        if runs and self._failures:  # other ranks may run on
            self._tell_failures(self._failures)
        elif runs and node.done:
            self._teller.tell(messages.Ended(plan.generation, self._told))
        elif not runs or node.ending or not node.generation.running:
            self._teller.tell(messages.Waiting(plan.generation, self._gone_s))

    def _begin_to_wait(self) -> None:
        if self._turnover.plan is not None and self._alone is None:
            self._alone_since, self._alone_s = time.monotonic(), 0.0
            self._alone = self._node.loop.later(self._isolated_s, self._give_up)

    def _end_waiting(self) -> float:
        """There is a head again; for how many seconds the ranks here, if they are gone, were so for want of one."""
        if self._alone is None:
            return 0.0
        self._alone.cancel()
        self._alone = None
        return time.monotonic() - self._alone_since

    def _give_up(self) -> None:
        """Leave, unless ranks go on here, or the folder pauses: nobody can lead then, and everybody waits."""
        self._alone_s += self._isolated_s
        if self._group.folder_silent_s > self._isolated_s / 2 or (not self.stuck() and self._alone_s < SILENT_S):
            self._alone = self._node.loop.later(self._isolated_s, self._give_up)
        else:
            why = f"no head of the run within reach for {self._isolated_s:g} s"
            self._node.end(lambda: self._leave(exitcodes.REQUEUE, why))

    def _tell_progress(self) -> None:
        plan = self._turnover.plan
        if plan is not None and plan.slots[:1] == (self._group.own.name,):
            self._teller.tell_progress()

    def prepare(self, plan: Plan) -> None:
        """Leave the generation before."""
        if not self._finished:
            self._turnover.prepare(plan)

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        """Take the place that ``plan`` gives this node."""
        if self._finished:
            return
        if self._head is not None and begun is not None:
            self._head.began(plan, begun)
        self._turnover.begin(plan, begun)
        if not plan.payload["keep"]:
            self._stop, self._gone_s, self._failures = None, 0.0, []
            self._stop_as_ordered()
        elif begun is not None:
            self._tell_state()

    def _tell_readiness(self) -> None:
        if self._turnover.plan is not None and not self._turnover.at_work:
            self._readiness.tell()

    def _not_ready(self, why: str) -> None:
        """Give the node back to the pool, once the head has heard why."""
        self._node.loop.later(LAST_WORDS_S, lambda: self._leave(exitcodes.FAILED, f"not ready as a spare: {why}"))

    def cut_off(self) -> None:
        """Run no ranks that others may have replaced; those that are being ended anyway need no more than that."""
        if self._turnover.plan is not None and not self._finished and not self._node.ending:
            say("neither a head of the run nor its folder is within reach; ending the ranks here")
            self._node.end(lambda: self._node.set_state("waiting"))

    def overtaken(self) -> None:
        """Another copy of the run has begun: what the ranks here did from now on could not be saved."""
        folder = self._node.folders.folder
        self._finish(exitcodes.FENCED, f"another copy of this run has begun in {folder}; this one stops")

    def joined(self, member: Member) -> None:
        """Let the head know."""
        if self._head is not None:
            self._head.joined(member)

    def lost(self, name: str, silent_s: float) -> None:
        """Let the head act."""
        if self._head is not None:
            self._head.lost(name, silent_s)

    def received(self, sender: str, body: Body) -> None:
        """Obey the head; as the head, decide."""
        try:
            message = CODEC.decode(body)
        except ProtocolError as error:
            say(f"{sender} sends {error}; it is ignored")
            return
        match message:
            case messages.StopOrdered():
                self._ordered = message
                self._stop_as_ordered()
            case messages.StandingsWanted(generation):
                if generation == self._node.generation.number and self._node.generation.running:
                    self._teller.tell(self._hang.report())
            case messages.HangFound():
                self._hang.judged(message)
            case _ if self._head is not None:
                self._head.received(sender, cast(Told, message))

    def _stop_as_ordered(self) -> None:
        """An order may come late, when other ranks run here, or early, before those that it means."""
        order = self._ordered
        if order is not None and order.generation == self._node.generation.number and not self._node.stopping:
            self._stop_ranks(order.stop)

    # -- the end -------------------------------------------------------------------------------------------------

    def _over(self, code: int, reason: str, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
        """This launcher, as the head, ends the run."""
        self._farewell.over(code, reason, lost, unfit)
        head = self._head
        self._node.loop.later(END_S, lambda: self._end_unclaimed(head, code, reason))

    def _end_unclaimed(self, head: Head | None, code: int, reason: str) -> None:
        """Unless another has led since, or this launcher anew: the run goes on then."""
        if self._head is head is not None and self._group.holds and not self._finished:
            say(f"the run's folder does not take the end of the run within {END_S:g} s; ending without")
            self._finish(code, reason)

    def over(self, end: End) -> None:
        """The run has ended."""
        self._finish(end.code, end.reason)

    def _finish(self, code: int, reason: str) -> None:
        if self._finished:
            return
        self._finished = True
        if self._head is not None:
            self._head.retire()
        self._node.end(lambda: self._leave(code, reason), gently=code == exitcodes.OK)

    def _leave(self, code: int, reason: str) -> None:
        self._finished = True
        self._farewell.leave(code, reason)
