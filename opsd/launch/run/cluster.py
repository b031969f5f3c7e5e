"""A launcher's part in the run: reports to the leader, carries out its orders, and runs the leader when elected.

A run on one node is the same with one launcher, which is the leader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from opsd import exitcodes
from opsd.checkpoints.claims import End
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.group import Group
from opsd.launch.claims.messages import Begun, Body
from opsd.launch.claims.tcp_group import LASTING
from opsd.launch.hangs.hang import Hang
from opsd.launch.io.control import Request
from opsd.launch.io.loop import Timer
from opsd.launch.io.protocol import Member, ProtocolError
from opsd.launch.io.reporting import print_message
from opsd.launch.io.run_log import OF_ONE_LAUNCHER
from opsd.launch.ranks.failure import COMPANION_REFUSED, Failure, RankError, first_cause
from opsd.launch.ranks.shutdown import SECOND_STOP_S
from opsd.launch.run import messages
from opsd.launch.run.aggregation import LocalHang, to_ages
from opsd.launch.run.generation_change import GenerationChange
from opsd.launch.run.launchers import cannot_listen
from opsd.launch.run.leader import Leader
from opsd.launch.run.messages import CODEC, Stop, StopReason, ToLeader
from opsd.launch.run.nodes import RunShape, assign_slots, usable
from opsd.launch.run.readiness import Readiness
from opsd.launch.run.run_control import CONTROL, RankFailure, answer
from opsd.launch.run.shutdown import BatchJob, Shutdown
from opsd.launch.run.slow_ranks import concerns
from opsd.launch.run.supervisor import Supervisor

PROGRESS_S = 1.0
STEP_TIMES_S = 2.0
READINESS_S = 30.0
"""How often a spare checks whether it may still be used."""
REFUSED_S = 1.0
"""How long a launcher that must not be used stays, to report it."""


class ClusterRun:
    """The ``RunControl`` of a launcher, and the ``GroupListener`` of its group.

    ``new_leader`` makes the ``Leader`` when this launcher leads. ``ready`` returns why this node must not replace
    another, "" if it may; a ``borrowed`` node then leaves. ``given_back`` returns when it was given back to service,
    epoch seconds. The signals of a borrowed node concern its own job, not the run. ``port`` as in ``GenerationChange``,
    ``isolated_s`` as in ``IsolationTimeouts``.
    """

    def __init__(
        self,
        node: Supervisor,
        group: Group,
        shape: RunShape,
        *,
        new_leader: Callable[[Callable[[int, str, tuple[str, ...], tuple[str, ...]], None]], Leader],
        job: BatchJob,
        ready: Callable[[], str],
        given_back: Callable[[], float | None] = lambda: None,
        lemon: Callable[[], bool] | None = None,
        borrowed: bool = False,
        port: int | None = None,
        isolated_s: float = 60.0,
    ) -> None:
        self._node = node
        self._group = group
        self._shape = shape
        self._new_leader = new_leader
        self._unlike = ""
        """The leader that was last said to have been started with another number of nodes."""
        self._given_back: Callable[[], float | None] | None = given_back
        """None once asked: a node is given back while no launcher runs there."""
        self._hang = LocalHang(node)
        self._readiness = Readiness(node.loop, group, ready, self._not_ready if borrowed else lambda why: None, lemon)
        self._shutdown = Shutdown(node, group, job, self._step_down)
        self._change = GenerationChange(node, group, self._readiness, self._shutdown, port=port, placed=self._placed)
        self._stops = LocalStops(node, group, self._change, self._shutdown, self._tell, borrowed=borrowed)
        self._isolation = IsolationTimeouts(
            node, group, self._change, self._shutdown, self.stuck, join_s=shape.join_s, isolated_s=isolated_s
        )
        self._leader: Leader | None = None
        self.led = False
        """Whether the newest leader that this launcher knows of is itself."""
        self._enough_since: float | None = None
        self._gone_s = 0.0
        self._failures: list[RankFailure] = []

    # -- the launcher's side -------------------------------------------------------------------------------------

    def start_run(self) -> None:
        """Join the group."""
        self._node.events.relay = self._relay
        try:
            self._group.start(self)
        except OSError as error:
            self._node.finish(exitcodes.FAILED, cannot_listen(self._group.own, error))
            return
        self._node.loop.every(PROGRESS_S, self._tell_first_progress)
        self._node.loop.every(STEP_TIMES_S, self._tell_step_times)
        self._node.loop.every(READINESS_S, self._tell_readiness)
        self._isolation.watch()

    @property
    def _generation(self) -> int:
        return self._node.generation.number

    def _tell(self, message: ToLeader) -> None:
        self._group.tell_leader(CODEC.encode(message))

    def _tell_progress(self) -> None:
        progress = self._node.progress
        self._tell(messages.Progress(self._generation, progress.furthest, progress.committed))

    def _tell_step_times(self) -> None:
        """Of no use to a later leader: nothing is kept for it."""
        times = self._node.step_times.take()
        if times is not None and self._group.leader is not None:
            progress = self._node.progress
            self._tell(messages.Progress(self._generation, progress.furthest, progress.committed, times))

    def _relay(self, record: dict[str, object]) -> None:
        """Send an event that concerns the whole run to the leader, with its age: the clocks of nodes may differ."""
        if record["event"] not in OF_ONE_LAUNCHER:
            self._tell(messages.Event(record, time.time() - float(str(record["t"]))))

    def cannot_start(self, reason: str) -> None:
        """Report it as a failure of this node's first rank."""
        failure = Failure(self._change.first_rank, reason, "environment", 0.0)
        failed = messages.Failed(self._generation, (messages.FailedRank(failure),))
        self._node.end(lambda: self._tell(failed))

    def companion_failed(self, reason: str) -> None:
        """Report it as a failure of this node's first rank, which the companion serves."""
        self._tell_companion(reason)

    def companion_refused(self, reason: str) -> None:
        """The same; the leader ends the run."""
        self._tell_companion(reason, RankError(COMPANION_REFUSED, reason, ""))

    def _tell_companion(self, reason: str, error: RankError | None = None) -> None:
        rank, step = self._change.first_rank, self._node.progress.furthest
        failure = Failure(rank, reason, "environment", time.time(), step=step, error=error)
        self._tell(messages.Failed(self._generation, (messages.FailedRank(failure),)))

    def failed(self, found: Sequence[RankFailure]) -> None:
        """Report the failures to the leader."""
        cause = first_cause([failure for failure, _ in found])
        for failure, rank in sorted(found, key=lambda pair: pair[0] is not cause):
            named = failure is cause and (failure.kind != "communication" or len(self._group.members) == 1)
            rank.report_exit(self._node.events, failure, culprit=named)
        self._failures += found
        self._tell_progress()
        self._tell_failures(found)

    def _tell_failures(self, found: Sequence[RankFailure]) -> None:
        self._tell(messages.Failed(self._generation, to_ages(found, time.time())))

    def hung(self, hang: Hang) -> None:
        """Let the leader check whether a rank of another node causes it."""
        if self._hang.seen(hang):
            self._tell(messages.Hung(self._generation))

    def ended(self) -> None:
        """Report that this node is done."""
        self._tell_progress()
        self._tell(messages.Ended(self._generation, self._stops.told, self._node.cut_off))

    def asked_to_stop(self, by: str) -> None:
        self._stops.asked(by)

    def stop_too_slow(self, reason: str) -> None:
        self._stops.too_slow(reason)

    def _placed(self) -> None:
        self._stops.leave_if_recalled()

    def interrupted(self) -> None:
        """Let the ranks end on SIGINT, then exit; the others go on without them, or get a SIGINT themselves."""
        self._shutdown.interrupt()
        self._leader = None

    def request(self, request: Request) -> Request:
        """Answer ``status``, ``restart`` and ``swap``."""
        between = self._change.between or self._node.ending or bool(self._node.stopping)
        return answer(
            request, self._group, between=between, generation=self._generation, tell=self._tell,
            waits=self._shape.wait_s > 0,
        )  # fmt: skip

    def last_look(self) -> None:
        self._shutdown.last_look()

    def close(self) -> None:
        """Leave the group."""
        self._group.leave()

    # -- the group's side ----------------------------------------------------------------------------------------

    def enough(self, reachable: Mapping[str, Member]) -> bool:
        """Whether a generation could be formed of the ``reachable`` nodes; at the start, after waiting for more."""
        plan = self._group.plan
        count = usable(reachable, plan.payload.get("unfit", ()) if plan is not None else ())
        enough = count >= self._shape.least
        if not enough or plan is not None or self._complete(reachable):
            self._enough_since = None
            return enough
        self._enough_since = self._enough_since or time.monotonic()
        return time.monotonic() - self._enough_since >= self._shape.last_call_s

    def _complete(self, reachable: Mapping[str, Member]) -> bool:
        """Whether more nodes would make no better first generation."""
        shape, there, everybody = self._shape, len(reachable), len(self._shape.order)
        if there < min(shape.most, everybody):
            return False
        if there >= everybody or shape.segment <= 1:
            return True
        shape = shape.seen_by(reachable.values())
        placed = assign_slots(shape, (), reachable, ())
        return placed is not None and not shape.topology.split_groups(placed, shape.segment)

    def stuck(self) -> bool:
        """Whether the ranks here make no progress, as far as is known."""
        return not self._node.generation.running or self._hang.lasts

    def leader_changed(self, leader: str | None) -> None:
        """Start to lead, or report this node's state to the new leader."""
        if self._shutdown.begun:
            return
        self._shutdown.leader_changed()
        self._step_down()
        self._leader = None
        if leader is None:
            self._isolation.leader_lost()
            return
        self._gone_s = self._isolation.leader_found()
        self.led = leader == self._group.own.name
        if self.led:
            self._leader = self._new_leader(self._shutdown.over)
            self._leader.take_over()
        self._tell_state()
        if self._change.plan is not None:
            self._stops.leave_if_recalled()

    def _step_down(self) -> None:
        if self._leader is not None:
            self._leader.step_down()

    def _tell_state(self) -> None:
        if self._stops.wanted:
            self._tell(messages.StopWanted(self._stops.wanted))
        plan, node = self._change.plan, self._node
        if plan is None:
            return
        self._tell_progress()
        if self._change.between or not self._change.at_work:
            return
        runs = node.generation.number == plan.generation
        if runs and self._failures:  # other ranks may run on
            self._tell_failures(self._failures)
        elif runs and node.done:
            self._tell(messages.Ended(plan.generation, self._stops.told, self._node.cut_off))
        elif not runs or node.ending or not node.generation.running:
            self._tell(messages.Waiting(plan.generation, self._gone_s))

    def _tell_first_progress(self) -> None:
        plan = self._change.plan
        if plan is not None and plan.slots[:1] == (self._group.own.name,):
            self._tell_progress()

    def prepare(self, plan: Plan) -> None:
        """End the previous generation."""
        if not self._shutdown.begun:
            self._change.prepare(plan)
        if self._given_back is not None and self._group.own.name in plan.payload.get("unfit", ()):
            ask, self._given_back = self._given_back, None
            self._node.loop.run_in_thread(ask, self._tell_given_back)

    def _tell_given_back(self, at: float | OSError | None) -> None:
        if isinstance(at, float):
            self._tell(messages.GivenBack(at))

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        """Take the place that ``plan`` gives this node."""
        if self._shutdown.begun:
            return
        self._compare_options(plan)
        if self._leader is not None and begun is not None:
            self._leader.began(plan, begun)
        self._change.begin(plan, begun)
        if not plan.payload["keep"]:
            self._gone_s, self._failures = 0.0, []
            self._stops.generation_begun()
        elif begun is not None:
            self._tell_state()

    def _compare_options(self, plan: Plan) -> None:
        """Say so if the leader was started with another number of nodes, once for each leader."""
        theirs, own = plan.payload.get("nnodes"), self._shape.nnodes
        if isinstance(theirs, str) and theirs != own and plan.leader != self._unlike:
            self._unlike = plan.leader
            print_message(
                f"this launcher was started with --nnodes {own}, and that on {plan.leader} with --nnodes {theirs}; "
                f"the run goes by that of {plan.leader}, which leads it: give all launchers the same arguments"
            )

    def _tell_readiness(self) -> None:
        if self._change.plan is not None and not self._change.at_work:
            self._readiness.tell()

    def _not_ready(self, why: str) -> None:
        """Return the node to its pool, once the leader has been told why."""
        self._node.loop.later(REFUSED_S, lambda: self._shutdown.leave(exitcodes.FAILED, f"not ready as a spare: {why}"))

    def cut_off(self) -> None:
        """End the ranks, which others may have replaced; ranks that are already being ended need nothing more."""
        if self._change.plan is not None and not self._shutdown.begun and not self._node.ending:
            print_message("neither a leader of the run nor its folder is within reach; ending the ranks here")
            self._node.end(lambda: self._node.set_state("waiting"))

    def overtaken(self) -> None:
        """Another copy of the run has begun: the ranks here can no longer save anything."""
        folder = self._node.folders.folder
        self._shutdown.finish(exitcodes.FENCED, f"another copy of this run has begun in {folder}; this one stops")

    def joined(self, member: Member) -> None:
        """Pass it to the leader, if that is this launcher."""
        if self._leader is not None:
            self._leader.joined(member)

    def lost(self, name: str, silent_s: float) -> None:
        """Pass it to the leader, if that is this launcher."""
        if self._leader is not None:
            self._leader.lost(name, silent_s)

    def received(self, sender: str, body: Body) -> None:
        """Carry out an order of the leader; as the leader, handle a report."""
        try:
            message = CODEC.decode(body)
        except ProtocolError as error:
            print_message(f"{sender} sends {error}; it is ignored")
            return
        match message:
            case messages.StopOrdered():
                self._stops.ordered(message)
            case messages.RankStatusesWanted(generation):
                # A node that is examining its ranks stays silent; the leader asks again at the next report.
                current = generation == self._node.generation.number and self._node.generation.running
                if current and not self._node.examining:
                    self._tell(self._hang.report())
            case messages.DumpsWanted(generation):
                if generation == self._node.generation.number:
                    self._node.write_dumps()
            case messages.HangFound():
                self._hang.judged(message)
            case messages.StragglerNews(event, fields):
                if concerns(fields, [rank.rank for rank in self._node.generation.ranks]):
                    self._node.events.write(event, None, fields, relayed=False)
            case _ if self._leader is not None:
                self._leader.received(sender, cast(ToLeader, message))

    def over(self, end: End) -> None:
        self._shutdown.finish(end.code, end.reason)


WATCH_S = 0.25
LASTING_S, SILENT_S = 30.0, 1800.0
"""How long the run's folder may fail with a lasting error, and with any."""


class IsolationTimeouts:
    """Timeouts of a launcher without the others, without a leader, or without the run's folder.

    ``stuck`` returns whether the ranks here make no progress.

    Without a reachable leader the launcher exits after ``join_s`` seconds at the start, and after ``isolated_s`` later.
    """

    def __init__(
        self,
        node: Supervisor,
        group: Group,
        change: GenerationChange,
        shutdown: Shutdown,
        stuck: Callable[[], bool],
        *,
        join_s: float,
        isolated_s: float,
    ) -> None:
        self._node = node
        self._group = group
        self._change = change
        self._shutdown = shutdown
        self._stuck = stuck
        self._join_s = join_s
        self._isolated_s = isolated_s
        self._alone: Timer | None = None
        self._since = self._alone_s = self._unwell_s = 0.0

    def watch(self) -> None:
        """Start the timers."""
        self._node.loop.every(WATCH_S, self._watch_folder)
        self._node.loop.later(self._join_s, self._nobody_came)

    def _nobody_came(self) -> None:
        if self._change.plan is None and self._group.leader is None:
            why = f"fewer launchers than the run needs have come within {self._join_s:g} s"
            self._shutdown.leave(exitcodes.FAILED, why)

    def _watch_folder(self) -> None:
        """Running ranks need no folder; a pause delays a recovery, a lasting error ends the launcher.

        So does a full disk where nothing is lost: before the run has begun.
        """
        led = self._group.leader not in (None, self._group.own.name)
        well = not self._group.replacing and (self._node.generation.running or (led and not self._change.between))
        self._unwell_s = 0.0 if well else self._unwell_s + WATCH_S
        error = self._group.folder_error
        lasting = error is not None and error.errno in LASTING
        unbegun = self._change.plan is None and not self._change.between
        full = error is not None and exitcodes.is_full(error.errno)
        limit_s = 0.0 if unbegun and (lasting or full) else LASTING_S if lasting else SILENT_S
        if min(self._group.folder_silent_s, self._unwell_s) > limit_s:
            why = (error.strerror or str(error)) if error is not None else f"no answer for {SILENT_S:g} s"
            code = exitcodes.FAILED if error is None else exitcodes.of_error(error)
            self._shutdown.finish(code, f"the run's folder cannot be used: {why}")

    def leader_lost(self) -> None:
        """There is no leader; wait for another one, once the run has begun."""
        if self._change.plan is not None and self._alone is None:
            self._since, self._alone_s = time.monotonic(), 0.0
            self._alone = self._node.loop.later(self._isolated_s, self._give_up)

    def leader_found(self) -> float:
        """There is a leader; returns for how many seconds there was none."""
        if self._alone is None:
            return 0.0
        self._alone.cancel()
        self._alone = None
        return time.monotonic() - self._since

    def _give_up(self) -> None:
        """Exit, unless ranks make progress here, or the folder pauses: then nobody can lead, and all wait."""
        self._alone_s += self._isolated_s
        if self._group.folder_silent_s > self._isolated_s / 2 or (not self._stuck() and self._alone_s < SILENT_S):
            self._alone = self._node.loop.later(self._isolated_s, self._give_up)
        else:
            why = f"no leader of the run within reach for {self._isolated_s:g} s"
            self._node.end(lambda: self._shutdown.leave(exitcodes.REQUEUE, why))


UNBEGUN_S = 5.0
"""How long a launcher that is stopped before its run has begun looks for a leader to tell."""


class LocalStops:
    """Why the ranks of one launcher stop: a signal, a command, an order of the leader, or its own job wants the node.

    A stop that is asked for here stops the whole run, except on a ``borrowed`` node, whose signals concern its own job.
    ``tell`` reports to the leader.
    """

    def __init__(
        self,
        node: Supervisor,
        group: Group,
        change: GenerationChange,
        shutdown: Shutdown,
        tell: Callable[[ToLeader], None],
        *,
        borrowed: bool,
    ) -> None:
        self._node, self._group, self._change, self._shutdown = node, group, change, shutdown
        self._tell, self._borrowed = tell, borrowed
        self.wanted: Stop | None = None
        """The first that was asked for here; a new leader has to hear of it."""
        self._stop: Stop | None = None
        self._idle_stops = 0
        """Requests received while no ranks ran here."""
        self._ordered: messages.StopOrdered | None = None
        self._recalled_by = ""

    @property
    def told(self) -> Stop | None:
        """The stop that the ranks here were told, None without one."""
        return self._stop if self._node.stopping else None

    def asked(self, by: str) -> None:
        """Stop here at once, and have all others stop: the signal may have reached this node only."""
        if self._shutdown.begun:
            self._shutdown.exit_now()
            return
        if self._borrowed and by != CONTROL:
            self._recalled_by = by
            self.leave_if_recalled()
            return
        stop = Stop(StopReason.REQUEST) if by == CONTROL else Stop(StopReason.SIGNAL, by)
        if self._node.generation.running and not self._node.stopping:
            self._say_how_long(stop)
        if self.wanted or not self._node.stopping:
            self._stop_ranks(stop)
        self.wanted = self.wanted or stop
        self._tell(messages.StopWanted(stop))
        if not self._node.generation.running:
            self._idle_stops += 1
            limit = self._node.settings.stop_timeout_s if self._change.plan is not None else UNBEGUN_S
            limit_s = (limit, min(limit, SECOND_STOP_S), 0.0)[min(self._idle_stops, 3) - 1]
            self._node.loop.later(limit_s, lambda: self._leave_idle(f"stopped after {by}"))

    def _say_how_long(self, stop: Stop) -> None:
        limit_s = self._node.settings.stop_timeout_s
        print_message(
            f"stop requested: the ranks have {limit_s:g} s to save and end "
            f"({stop}; a second one leaves {min(limit_s, SECOND_STOP_S):g} s, a third none)"
        )

    def _leave_idle(self, reason: str) -> None:
        """Exit if nobody has ended the run; ranks that were started meanwhile stop in their own time."""
        if not self._node.generation.running:
            self._shutdown.leave(exitcodes.REQUEUE, reason)

    def _stop_ranks(self, stop: Stop) -> None:
        self._stop = stop
        self._node.stop(str(stop))

    def leave_if_recalled(self) -> None:
        """If this borrowed node is wanted back, leave once another node has taken its place at a step boundary."""
        if not self._recalled_by:
            return
        why = f"its own job ends ({self._recalled_by})"
        if self._change.at_work:
            self._tell(messages.Leaving(self._node.generation.number, why))
        else:
            self._node.end(lambda: self._shutdown.leave(exitcodes.INTERRUPTED, f"{self._group.own.name} goes: {why}"))

    def too_slow(self, reason: str) -> None:
        """Kill the ranks of this node; the leader ends the run, or goes on from the last checkpoint.

        Ranks that are already being ended belong to a generation change, which continues.
        """
        if self._node.ending:
            return
        late = messages.Late(self._node.generation.number, reason, self.told)
        self._node.end(lambda: self._tell(late))

    def ordered(self, order: messages.StopOrdered) -> None:
        """The leader orders it."""
        self._ordered = order
        self._stop_as_ordered()

    def generation_begun(self) -> None:
        """Other ranks run here now, which have been told nothing yet."""
        self._stop = None
        self._stop_as_ordered()

    def _stop_as_ordered(self) -> None:
        """An order may arrive late, when other ranks run here, or early, before the ranks that it concerns."""
        order = self._ordered
        if order is not None and order.generation == self._node.generation.number and not self._node.stopping:
            self._stop_ranks(order.stop)
