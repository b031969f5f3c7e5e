"""Decides about a run, in the launcher that was elected.

The leader keeps no state that a successor could not have. Its decisions are in the plan of the generation, and the
nodes report their state again to a new leader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from opsd import exitcodes
from opsd.collectors.lib.nccl.desync import Desync
from opsd.events import (
    Finished,
    GenerationStarted,
    HangDetected,
    LauncherJoined,
    NodeLost,
    RanksGone,
    SegmentSplit,
    SpareJoined,
    SpareWanted,
    Stopped,
)
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.election import LeaderView
from opsd.launch.claims.messages import Begun
from opsd.launch.hangs.hang import Hang
from opsd.launch.hangs.recorder import RecorderJudge, with_verdict
from opsd.launch.hangs.watch import hang_fields
from opsd.launch.io.loop import Timers
from opsd.launch.io.protocol import Member
from opsd.launch.io.reporting import print_message
from opsd.launch.io.run_log import RunEventLog
from opsd.launch.ranks.failure import (
    COMPANION_REFUSED,
    PROGRAM_NOT_FOUND,
    Failure,
    RestartPolicy,
    explain,
    missing_module,
)
from opsd.launch.ranks.settings import gpu_count, python_with
from opsd.launch.run import messages
from opsd.launch.run.aggregation import FailureAggregation, FailureReport, HangInquiry, Stacks, rank_statuses, reports
from opsd.launch.run.messages import CODEC, Stop, ToLeader
from opsd.launch.run.nodes import GenerationPlanner, NodeHealth, RunShape
from opsd.launch.run.slow_ranks import SlowRankWatch
from opsd.launch.run.stops import StopCoordinator
from opsd.slurm.topology import Topology


class Leader:
    """Makes the plans.

    ``over`` is called with the exit code, the reason, the lost and the unfit nodes before the end of the run is
    claimed. ``recorder`` judges the flight recorders of a hang. ``interrupted`` gets the reason why all ranks are
    restarted, ``say`` other sentences for people.
    """

    def __init__(
        self,
        shape: RunShape,
        group: LeaderView,
        loop: Timers,
        policy: RestartPolicy,
        log: RunEventLog,
        over: Callable[[int, str, tuple[str, ...], tuple[str, ...]], None],
        recorder: RecorderJudge | None = None,
        interrupted: Callable[[str], None] = print_message,
        say: Callable[[str], None] = print_message,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._group = group
        self._shape = shape
        self._policy = policy
        self._log = log
        self._over = over
        self._recorder = recorder
        self._interrupted = interrupted
        self._say = say
        self._clock = loop.time
        self._health = NodeHealth(log, lambda: self._planner.spares, wall, shape.lemons)
        self._planner = GenerationPlanner(shape, group, loop, self._health, self, say)
        self._stops = StopCoordinator(self._planner, group, self._health, log, self, say)
        self._growth = Growth(shape, self._planner, self._clock, self._stops.grow)
        self._failures = FailureAggregation(loop, shape.victim_s, self._judge)
        self._hangs = HangInquiry(loop, self._ask_rank_statuses, self._hung)
        self._slow = SlowRankWatch(loop, self._announce_straggler, self._clock)
        self._first_rank: dict[str, int] = {}
        self._world_size = 0
        self._restarts = 0
        self.furthest: int | None = None
        """The highest completed step that is known."""
        self._committed: int | None = None
        self._finished = False
        self._noticed = self._clock()

    def take_over(self) -> None:
        """Start to lead. The generation of the previous leader goes on if all of its nodes are present.

        Also called if this launcher led before and lost touch: the others may not have noticed, and report their state
        again.
        """
        plan, group = self._group.plan, self._group
        if plan is None:
            self._remember_earlier_start()
            self._planner.propose_next()
            return
        self._restore(plan)
        lost = [member.name for member in plan.members if member.name not in group.alive]
        gone = next((name for name in plan.slots if name in lost), None)
        for name in lost:
            self._note_lost(name, group.leaderless_s, told=name != gone)
        if gone is not None:
            self._recover_from_loss(gone, group.leaderless_s)
        elif not plan.slots or not group.begun:
            self._planner.propose_next()
        else:
            self._planner.keep(plan)

    def _remember_earlier_start(self) -> None:
        """A failure that came on other nodes before the requeue, and comes again, is the program's."""
        with suppress(KeyError, TypeError, ValueError):  # of another version
            self._policy.restore(self._group.inherited["policy"])

    def _restore(self, plan: Plan) -> None:
        memory = plan.payload
        if "policy" in memory:
            self._policy.restore(memory["policy"])
            self._restarts = int(memory["restarts"])
            self._health.restore(memory)
        self._planner.take_over(plan)
        self._know(plan)

    # -- nodes ---------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """Another launcher has joined."""
        self._health.joined(member.name)
        if self._planner.waiting:
            self.propose_next()
        elif self._planner.plan is not None:
            self._log.emit("launcher_joined", **LauncherJoined(joined=member.name))
        self._growth.look()

    def lost(self, name: str, silent_s: float) -> None:
        """A launcher is lost, and with it, as far as is known, its node."""
        if self._finished:
            return
        changing = self._planner.changing
        at_work = not changing and name in self._planner.placed and not self._planner.waiting
        self._note_lost(name, silent_s, told=not at_work)
        if changing:
            if name in self._planner.proposed:  # those that went with it were left out before
                self.propose_next()
        elif at_work:
            self._recover_from_loss(name, silent_s)
        else:
            self._growth.look()

    def _note_lost(self, name: str, silent_s: float, *, told: bool) -> None:
        self._health.gone.add(name)
        needed = name in self._planner.placed or not self._planner.slots
        self._log.emit("node_lost", **NodeLost(lost=name, silent_s=round(silent_s, 3), ranks=needed))
        if told:
            self._say(_loss(name, silent_s))

    def _recover_from_loss(self, name: str, silent_s: float) -> None:
        rank = self._first_rank.get(name, 0)
        cause = Failure(rank, f"the loss of node {name}", "hardware", time.time(), self.furthest)
        self._noticed = self._clock() - silent_s
        self._recover(FailureReport(name, cause, "", ""), said=_loss(name, silent_s))

    def payload(self, keep: int) -> dict[str, Any]:
        """The leader's state for successors and launchers, as part of the plan."""
        return {
            "policy": self._policy.snapshot(),
            "restarts": self._restarts,
            **self._health.snapshot(),
            "nnodes": self._shape.nnodes,
            "noticed_s": self._clock() - self._noticed,
            "first": self._planner.plan is None,
            "keep": keep,
        }

    def too_few(self, reason: str) -> None:
        """End the run, so that Slurm finds other nodes."""
        self.end(exitcodes.REQUEUE, reason)

    def began(self, plan: Plan, begun: Begun) -> None:
        """All nodes of ``plan`` are ready: its ranks are started, or keep running."""
        before = self._planner.slots
        self._planner.begun(plan)
        self._know(plan)
        self._growth.look()
        self._note_progress(begun.furthest, begun.committed)
        if plan.payload["keep"]:
            return
        for event, fields in begun_events(self._shape, plan, before, self._group.alive.values()):
            self._log.emit(event, **fields)

    def _know(self, plan: Plan) -> None:
        self._log.generation = plan.generation
        sizes = [plan.sizes[name] for name in plan.slots]
        self._first_rank = dict(zip(plan.slots, accumulate(sizes, initial=0), strict=False))
        self._world_size = sum(sizes)

    # -- messages ------------------------------------------------------------------------------------------------

    def received(self, sender: str, message: ToLeader) -> None:
        """A node reports something, or requests something."""
        plan = self._planner.plan
        match message:
            case messages.Event(record, age_s):
                self._log.relay(record, age_s)
            case messages.Progress(generation, furthest, committed, times):
                self._note_progress(furthest, committed)
                if times is not None and plan is not None and generation == plan.generation and not self._finished:
                    self._slow.add(sender, times)
            case _ if self._finished:
                pass
            case messages.StopWanted(stop):
                self._stops.stop(stop)
            case messages.Readiness(why, lemon):
                self._note_readiness(sender, why, lemon)
            case messages.GivenBack(at):
                if self._health.given_back(sender, at):
                    self._spare_came()
            case _ if plan is not None and not self._planner.changing and message.generation == plan.generation:
                self._note(sender, message)

    def _note(self, sender: str, message: ToLeader) -> None:
        """A report about the generation that runs."""
        match message:
            case messages.Failed(_, failures):
                self._failures.add(reports(sender, failures, time.time()), alone=len(self._planner.slots) == 1)
            case messages.Hung():
                if not self._failures.open:
                    self._hangs.begin(self._stops.at_work)
            case messages.RankStatuses(_, ranks, stacks):
                self._hangs.add(sender, list(rank_statuses(ranks, self._clock())), stacks)
            case messages.Ended(_, told, cut_off):
                self._stops.ended(sender, told, cut_off=cut_off)
            case messages.Waiting(_, gone_s):
                self._log.emit("ranks_gone", gone_s, **RanksGone(gone=sender, gone_s=round(gone_s, 3)))
                self._stops.ranks_gone(sender)
            case messages.Late(_, reason, told):
                self._stops.too_slow(told, reason)
            case messages.RestartWanted(_, reason):
                self._stops.restart(reason)
            case messages.SwapWanted(_, node, reason):
                self._stops.swap(node, reason)
            case messages.Leaving(_, reason):
                self._stops.release(sender, reason)
            case messages.SpareWanted(_, node, reason):
                self._log.emit("spare_wanted", **SpareWanted(swap=node, reason=reason))

    def _note_readiness(self, node: str, why: str, lemon: bool) -> None:
        self._health.note_lemon(node, lemon)
        if self._health.note_readiness(node, why):
            self._spare_came()
        if not why:
            self._stops.spare_ready()

    def _spare_came(self) -> None:
        """Another node may take a slot, or one may no more."""
        if self._planner.changing or self._planner.waiting:
            self.propose_next()
        self._growth.look()

    def propose_next(self) -> None:
        """Propose the next generation."""
        self._health.keep(self._planner.slots)
        self._planner.propose_next()

    def _note_progress(self, furthest: int | None, committed: int | None) -> None:
        self.furthest = later(self.furthest, furthest)
        before, self._committed = self._committed, later(self._committed, committed)
        if self._committed != before:
            self._growth.saved()

    # -- failures ------------------------------------------------------------------------------------------------

    def _judge(self, report: FailureReport) -> None:
        """The first cause of the failures is known."""
        cause = report.failure
        self._noticed = self._failures.noticed
        if cause.error is not None and cause.error.type == PROGRAM_NOT_FOUND:
            where = f" (on {report.node})" if len(self._planner.slots) > 1 else ""
            self.end(exitcodes.NOT_FOUND, f"{cause.error.message}{where}")
        elif cause.error is not None and cause.error.type == COMPANION_REFUSED:
            self.end(exitcodes.USAGE, cause.error.message)
        else:
            self._recover(report)

    def _recover(self, report: FailureReport, *, named: bool = True, said: str = "") -> None:
        """Restart all ranks; the report counts against its node only if it was ``named``. ``said`` is it in words."""
        cause = report.failure
        if self._stops.final:
            code = exitcodes.REQUEUE if report.node in self._health.gone else exitcodes.FAILED
            self.end(code, f"rank {cause.rank} on {report.node} failed while the run was stopping: {cause.cause}")
            return
        verdict = self._policy.judge(cause, report.node, furthest=self.furthest, committed=self._committed)
        if verdict is not None:
            hint = python_with(missing_module(cause.error))
            self.end(verdict.code, explain(verdict, cause, report.node, report.log, report.tail, hint))
            return
        said = said or f"rank {cause.rank} on {report.node} failed {cause.when} with {cause.cause}"
        self._interrupted(said)
        self._restarts += 1
        if named:
            self._health.note_fault(report.node, cause, self._policy.repeats(cause, report.node))
        self.propose_next()

    def _ask_rank_statuses(self) -> None:
        self._group.tell_all(CODEC.encode(messages.RankStatusesWanted(self._log.generation)))

    def _hung(self, hang: Hang, stacks: Stacks) -> None:
        """Ask the flight recorders before the ranks are killed."""
        generation, alone = self._log.generation, len(self._first_rank) == 1

        def judged(verdict: Desync | None) -> None:
            self._end_hang(with_verdict(hang, verdict), stacks)

        if self._recorder is None:
            judged(None)
        elif self._recorder.judge(generation, self._world_size, alone=alone, then=judged) and not alone:
            self._group.tell_all(CODEC.encode(messages.DumpsWanted(generation)))

    def _end_hang(self, hang: Hang, stacks: Stacks) -> None:
        rank = hang.rank if hang.rank is not None else 0
        node = max((first, name) for name, first in self._first_rank.items() if first <= rank)[1]
        fields = hang_fields(replace(hang, stacks=stacks.get(node)))
        whole: HangDetected = {**fields, "culprit_node": None if hang.rank is None else node}
        self._log.emit("hang_detected", **whole)
        self._group.tell_all(CODEC.encode(messages.HangFound({**fields}, hang.score)))
        cause = Failure(rank, f"a hang in {hang.phase}", "hang", time.time(), hang.step, hang.phase, detail=hang.reason)
        self._noticed = self._clock()
        self._recover(FailureReport(node, cause, "", ""), named=hang.rank is not None)

    def _announce_straggler(self, event: str, fields: dict[str, Any]) -> None:
        self._log.emit(event, **fields)
        self._group.tell_all(CODEC.encode(messages.StragglerNews(event, fields)))

    # -- what requests lead to -----------------------------------------------------------------------------------

    def note_interruption(self) -> None:
        """The run makes no progress from now on."""
        self._noticed = self._clock()

    def restart_all(self) -> None:
        """Start the next generation at once, from the last checkpoint."""
        self.note_interruption()
        self._restarts += 1
        self.propose_next()

    def stopped(self, stop: Stop, *, cut_off: bool) -> None:
        """The ranks have ended, as requested: the run is to be started again."""
        self._log.emit("stopped", **Stopped(signal=str(stop), step=self.furthest))
        how = f"ended by {stop}, which ranks do not handle" if cut_off else f"stopped in good order after {stop}"
        self.end(exitcodes.REQUEUE, how + _saved(self.furthest, self._committed))

    def replaced(self) -> None:
        """Forget what was known of the generation that ends."""
        self._failures.forget()
        self._hangs.forget()
        if self._recorder is not None:
            self._recorder.forget()
        self._slow.forget()
        self._stops.forget()
        self._growth.forget()

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, code: int, reason: str) -> None:
        """Claim the end of the run: all launchers exit with ``code``."""
        if self._finished:
            return
        self._finished = True
        self.step_down()
        self._log.emit("finished", **Finished(exit_code=code, reason=reason))
        lost, unfit = tuple(sorted(self._health.gone)), tuple(sorted(self._health.retired))
        memory = {"policy": self._policy.memory()} if code == exitcodes.REQUEUE else {}
        self._over(code, reason, lost, unfit)
        self._group.end(code, reason, lost, unfit, memory)

    def step_down(self) -> None:
        """Make no more decisions: another launcher leads, or the run is over."""
        self.replaced()
        self._planner.close()


def _loss(node: str, silent_s: float) -> str:
    return f"node {node} is lost: nothing heard of it for {silent_s:.1f} s"


def _saved(furthest: int | None, committed: int | None) -> str:
    """The newest checkpoint of a run that has done ``furthest`` steps, as the end of a sentence; "" if nobody knows."""
    if committed is None:
        return "" if furthest is None else "; no checkpoint was seen"
    newest, again = f"; the newest checkpoint is that of step {committed}", (furthest or 0) - committed
    return f"{newest}, {again} step{'s are' if again > 1 else ' is'} done again" if again > 0 else newest


def later(known: int | None, step: int | None) -> int | None:
    """The higher of a known and a reported step, either of which may be None."""
    return step if known is None else known if step is None else max(known, step)


class Growth:
    """Calls ``grow`` after a checkpoint, once the run has missed as much for want of ready spares as a restart costs.

    What was missed is in seconds of the grown run, the cost is ``shape.grow_s``, 0 for never. This is the ski-rental
    rule: waiting and restart together cost at most twice what the better choice would have, whenever the next restart
    comes, and a spare that comes and goes brings no more restarts than that. Right after a checkpoint hardly a step is
    lost, also with a program that cannot stop in good order. A restart for another reason takes the spares in, too.
    """

    def __init__(
        self, shape: RunShape, planner: GenerationPlanner, clock: Callable[[], float], grow: Callable[[], None]
    ) -> None:
        self._shape = shape
        self._planner = planner
        self._clock = clock
        self._grow = grow
        self._missed_s = self._share = self._since = 0.0

    def look(self) -> None:
        """Nodes have come, gone, or got ranks."""
        now = self._clock()
        self._missed_s += self._share * (now - self._since)
        self._since, self._share = now, self._missing()

    def saved(self) -> None:
        """Another checkpoint is durable."""
        self.look()
        if self._share and self._missed_s >= self._shape.grow_s > 0:
            self._grow()

    def _missing(self) -> float:
        """The share of the grown run's speed that the run lacks now."""
        planner, slots = self._planner, len(self._planner.slots)
        if not 0 < slots < self._shape.most or planner.changing or planner.waiting:
            return 0.0
        more = min(len(planner.spares), self._shape.most - slots)
        return more / (slots + more)

    def forget(self) -> None:
        """Another generation is proposed."""
        self._missed_s = self._share = 0.0


def begun_events(
    shape: RunShape, plan: Plan, before: Sequence[str], launchers: Iterable[Member]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a generation that starts: which spares came in for those of ``before``, and where all nodes are."""
    joined = {*plan.slots} - {*before} if before else ()
    for place, name in enumerate(plan.slots):
        if name in joined:
            cost = _swap_cost(shape.topology, before, plan.slots, place)
            yield "spare_joined", {**SpareJoined(joined=name, place=place), **cost}
    size = sum(plan.sizes[name] for name in plan.slots)
    gpus = gpu_count(os.environ) * len({*plan.slots, *plan.spares})
    nodes, spares = list(plan.slots), list(plan.spares)
    yield "generation_started", {**GenerationStarted(world_size=size, gpus=gpus, nodes=nodes, spares=spares)}
    for fields in _split_segments(shape.seen_by(launchers).topology, plan.slots, shape.segment):
        yield "segment_split", {**fields}


def _swap_cost(topology: Topology, before: Sequence[str], slots: Sequence[str], place: int) -> dict[str, Any]:
    """Whose place ``slots[place]`` has, the mean hops of both to the other nodes, and bad ways to them, if known."""
    old = before[place] if place < len(before) and before[place] not in slots else None
    if old is None:
        return {}
    hops = topology.swap_hops(slots, old, slots[place])
    bad = [topology.bad_text(pair) for pair in topology.bad_from(slots[place], slots)]
    cost = {"hops_before": hops[0], "hops": hops[1]} if hops is not None else {}
    return {"replaces": old} | cost | ({"bad_ways": bad} if bad else {})


def _split_segments(topology: Topology, slots: Sequence[str], segment: int) -> list[SegmentSplit]:
    """The segments that are in several NVLink domains or below several leaf switches, by their first node rank."""
    found = []
    for group in topology.split_groups(slots, segment):
        places: dict[str, list[str]] = {}
        for node in group:
            places.setdefault(topology.place(node) or "unknown", []).append(node)
        first = slots.index(group[0])
        found.append(SegmentSplit(first=first, last=first + len(group) - 1, places=places))
    return found
