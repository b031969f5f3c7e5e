"""A job under ``opsd launch``: the leader, the planner and the health of nodes are those of production."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from opsd import exitcodes
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Begun, Body
from opsd.launch.hangs.hang import EARLY_S, RankStatus
from opsd.launch.hangs.limits import FACTOR, HangLimits
from opsd.launch.io.loop import Callback, Timer
from opsd.launch.io.protocol import Member
from opsd.launch.ranks.failure import Failure, RankError, RestartPolicy
from opsd.launch.run.leader import Leader
from opsd.launch.run.messages import (
    CODEC,
    Ended,
    Failed,
    FailedRank,
    GivenBack,
    Hung,
    Late,
    Progress,
    RankStatuses,
    Readiness,
    SpareWanted,
    StopOrdered,
    SwapWanted,
    ToLeader,
)
from opsd.launch.run.nodes import RunShape
from opsd.runbooks.straggler import LEAST_STEPS
from opsd.simulate.faults import PASSING, SimulatedFault
from opsd.simulate.job import Job, World
from opsd.slurm import node_comment
from opsd.slurm.spare_jobs import wants_spare

MAX_RESTARTS = 8
"""Default of ``opsd launch --max-restarts``."""
STOP_TIMEOUT_S = 120.0
"""Default of ``opsd launch --stop-timeout``."""


class SupervisedJob(Job):
    """Its launchers, ranks and agents: they report to the leader what they would, and do what it orders."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        policy = world.policy
        self._shape = RunShape(
            policy.least, world.nodes, world.cluster.names, wait_s=policy.wait_s, grow_s=policy.grow_s,
            topology=world.cluster.topology,
        )  # fmt: skip
        self._group: SimulatedGroup
        self._leader: Leader | None = None
        self._log = SimulatedLog(self._event)
        self._plan: Plan | None = None
        """That of the ranks that run or have run last."""
        self._ranked: tuple[str, ...] = ()
        """The nodes that last had ranks in this start."""
        self._beginning: Timer | None = None
        self._succeeded = self._at_work = False
        self._unmet = 0
        """Jobs for spares that wait for a node."""
        self._inherited: Mapping[str, Any] = {}
        """The state that the last start has left for the next."""

    # -- starts and generations ------------------------------------------------------------------------------------

    def launch(self, names: list[str]) -> None:
        self._plan, self._ranked, self._unmet = None, (), 0
        self._group = SimulatedGroup(names, self._proposed, self._ordered, self._ended, self._inherited)
        self._lead()

    def _lead(self) -> None:
        self._leader = Leader(
            self._shape, self._group, self.world.loop, RestartPolicy(MAX_RESTARTS), self._log,
            over=lambda *_: None, interrupted=lambda _: None, say=lambda _: None, wall=self.world.loop.time,
        )  # fmt: skip
        self._leader.take_over()

    def _proposed(self, plan: Plan) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        delay_s = 0.0
        if not plan.payload["keep"]:
            self._at_work = False
            self.world.account.idle(self.world.loop.time(), "restart" if plan.slots else "waiting")
            if plan.slots:
                changed = self._plan is None or not set(plan.slots) <= set(self._plan.slots)
                delay_s = self.world.times.generation_s(changed=changed, succeeded=self._succeeded)
        self._beginning = self.world.loop.later(delay_s, lambda: self._begin(plan))

    def _begin(self, plan: Plan) -> None:
        assert self._leader is not None
        restarts = plan.slots and not plan.payload["keep"]
        if restarts and (left_s := self.without_storage()) > 0:  # there is no claim without a folder
            self._beginning = self.world.loop.later(left_s, lambda: self._begin(plan))
            return
        self._group.begun, self._succeeded = True, False
        if not plan.payload["keep"]:
            self._plan = plan
        self._leader.began(plan, Begun("", 0, *self._steps()))
        if not restarts:
            return
        self.swaps += len(set(plan.slots) - set(self._ranked)) if self._ranked else 0
        self._ranked, self._at_work = plan.slots, True
        self._soon(self.world.times.program_s, lambda: self._first_step(plan))
        self._meet_broken_nodes(plan)

    def _first_step(self, plan: Plan) -> None:
        if not self._at_work or self._plan is not plan:
            return
        if (left_s := self.without_storage()) > 0:
            self._soon(left_s, lambda: self._first_step(plan))
        else:
            self.compute(len(plan.slots) / self.world.nodes)
            self._saves(plan)

    def _steps(self) -> tuple[int, int]:
        return self.world.account.steps(self.world.step_s, self.world.loop.time())

    def _saves(self, plan: Plan) -> None:
        """A run that may grow hears of each checkpoint; to others that makes no difference."""
        if len(plan.slots) == self.world.nodes:
            return

        def saved() -> None:
            if self._at_work and self._plan is plan:
                self._tell(plan.slots[0], Progress(self._log.generation, *self._steps()))
                self._saves(plan)

        self._soon(self.world.interval_s + self.world.stall_s, saved)

    def _meet_broken_nodes(self, plan: Plan) -> None:
        """Those that broke meanwhile, or that nobody has taken out of service."""
        broken = self.world.cluster.broken
        for name in [name for name in self._group.alive if name in broken]:
            if name not in plan.slots:
                self._soon(0.0, lambda name=name: self._sent_away(name))  # type: ignore[misc]
            elif broken[name].effect == "degraded":
                self._soon(self._found_s(broken[name]), lambda name=name: self._swap(name))  # type: ignore[misc]
            elif self._at_work:
                self._rank_dies(name, broken[name], at_once=True)

    def _soon(self, delay_s: float, callback: Callback) -> None:
        """Call back if this start still lasts then."""
        start = self.start
        self.world.loop.later(delay_s, lambda: callback() if start == self.start else None)

    def stop(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        if self._leader is not None:
            self._leader.step_down()
        self._leader = self._plan = None
        self._inherited = {}

    def _ended(self, code: int, avoid: tuple[str, ...], memory: Mapping[str, Any]) -> None:
        """The leader has claimed the end of the run."""
        if self._beginning is not None:
            self._beginning.cancel()
        self._leader = self._plan = None
        self._inherited = memory
        if code == exitcodes.REQUEUE:
            self.avoid(avoid)
            self.requeue(self.world.times.queue_s)
        else:
            self.resubmit()

    # -- faults --------------------------------------------------------------------------------------------------

    @property
    def ranked(self) -> tuple[str, ...]:
        return self._slots

    @property
    def places(self) -> tuple[str, ...]:
        return self._ranked if self._leader is not None else ()

    @property
    def _slots(self) -> tuple[str, ...]:
        return self._plan.slots if self._plan is not None else ()

    def fault(self, name: str, fault: SimulatedFault) -> None:
        if fault.effect == "lost":
            self.lose(name)
        if self._leader is None or name not in self._group.alive:
            return
        times, at_work = self.world.times, self._at_work and name in self._slots
        if fault.effect in ("lost", "launcher"):
            if at_work:
                self._stand_still(fault)
            dead = fault.effect == "lost"
            silent_s = times.silence_s if dead else times.closed_s
            self._soon(silent_s, lambda: self._lost(name, silent_s, free=dead))
        elif at_work and fault.effect == "hang":
            self._rank_hangs(name, fault)
        elif at_work and fault.effect != "degraded":
            self._rank_dies(name, fault)
        elif name in self._slots and fault.effect == "degraded":
            self._soon(self._found_s(fault), lambda: self._swap(name))
        elif fault.effect not in PASSING and name not in self._slots:
            self._soon(times.agent_s, lambda: self._sent_away(name))

    def _found_s(self, fault: SimulatedFault) -> float:
        """Until a node that works on is found; a slow one is only after some steps."""
        return self.world.times.agent_s + (LEAST_STEPS * self.world.step_s if fault.speed < 1 else 0.0)

    def _stand_still(self, fault: SimulatedFault) -> None:
        self._at_work = False
        self.world.account.idle(self.world.loop.time(), "detection", fault.kind)

    def _lost(self, name: str, silent_s: float, *, free: bool = True) -> None:
        """A launcher is gone, and with it its node; unless that is ``free``, the job still has it."""
        assert self._leader is not None
        if self._group.alive.pop(name, None) is None:
            return
        if free:
            self.held.discard(name)
        if not self._group.alive:
            self._leader.step_down()
            self._ended(exitcodes.REQUEUE, (name,), {})
        elif name == self._group.own:
            self._leader.step_down()
            self._succeeded = True
            broken = self.world.cluster.broken
            self._group.succeed(silent_s, [one for one, fault in broken.items() if fault.effect == "lost"])
            self._lead()
        else:
            self._leader.lost(name, silent_s)

    def _rank_dies(self, name: str, fault: SimulatedFault, *, at_once: bool = False) -> None:
        """``at_once``: before its first step."""
        self._stand_still(fault)
        furthest, committed = self._steps()
        failure = failed(self._slots.index(name), fault, None if at_once else furthest, at_once=at_once)
        generation = self._log.generation

        def noticed() -> None:
            self._tell(name, Progress(generation, furthest, committed))
            self._tell(name, Failed(generation, (failure,)))

        self._soon(self.world.times.noticed_s, noticed)

    def _rank_hangs(self, name: str, fault: SimulatedFault) -> None:
        self._stand_still(fault)
        furthest, committed = self._steps()
        generation, slots, step_s = self._log.generation, self._slots, self.world.step_s

        def judged() -> None:
            self._tell(name, Progress(generation, furthest, committed))
            self._tell(name, Hung(generation))
            for one, status in zip(slots, hung_statuses(generation, slots, name, furthest, step_s), strict=True):
                self._tell(one, status)

        self._soon(hang_judged_s(step_s), judged)

    def _tell(self, name: str, message: ToLeader) -> None:
        if self._leader is not None and name in self._group.alive:
            self._leader.received(name, message)

    # -- swaps and spares ----------------------------------------------------------------------------------------

    def _swap(self, name: str) -> None:
        """The agent of a node that works on asks for a swap, or for a spare if none is there (agent/swap.py)."""
        fault = self.world.cluster.broken.get(name)
        if fault is None or name not in self._slots or not self._at_work:
            return
        spare = self._group.alive.keys() - set(self._slots) - self.world.cluster.broken.keys()
        if spare or not self.world.policy.fetch:
            self._tell(name, SwapWanted(self._log.generation, name, fault.kind))
        else:
            self._tell(name, SpareWanted(self._log.generation, name, fault.kind))

    def _ordered(self, order: StopOrdered) -> None:
        """Save at the next step boundary, then end."""

        def boundary() -> None:
            if self._at_work and self._log.generation == order.generation:
                fault = self.world.cluster.broken.get(order.stop.what)
                cause = fault.kind if fault is not None else None
                left_s = self.world.cluster.away("storage")[0]
                in_time = left_s <= STOP_TIMEOUT_S
                self.world.account.idle(self.world.loop.time(), "checkpoint", cause, kept=in_time)
                self._soon(left_s + self.world.stall_s if in_time else STOP_TIMEOUT_S, saved if in_time else late)

        def late() -> None:
            self._tell(self._slots[0], Late(order.generation, "the checkpoint takes too long", order.stop))

        def saved() -> None:
            for name in self._slots:
                self._tell(name, Ended(order.generation, order.stop))

        self._soon(self.world.step_s / 2, boundary)

    def _sent_away(self, name: str) -> None:
        """A broken node without ranks: it is no spare, and leaves the job if Slurm has it drained."""
        fault = self.world.cluster.broken.get(name)
        if fault is None or name in self._slots or name not in self._group.alive:
            return
        self._tell(name, Readiness(fault.kind))
        (node,) = self.world.cluster.nodes([name])
        if node.out_of_service and self._leader is not None:
            self._lost(name, 0.0)

    def _event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "spare_joined" and "hops" in event:
            self.hops.append((event["hops_before"], event["hops"]))
        if self.world.policy.fetch and wants_spare(event):
            self._soon(self.world.times.fetch_s, self._arrive)

    def _arrive(self) -> None:
        """A job for a spare has started, or waits for a node, or for Slurm."""
        assert self._leader is not None
        cluster = self.world.cluster
        if (left_s := cluster.away("controller")[0]) > 0:
            self._soon(left_s, self._arrive)
            return
        name = next((name for name in cluster.usable(but=self.held) if name not in cluster.broken), None)
        if name is None:
            self._unmet += 1
            return
        self.held.add(name)
        member = self._group.join(name)
        self._leader.joined(member)
        if (back_at := node_comment.read(cluster.comments([name])[name]).back_at) is not None:
            self._tell(name, GivenBack(back_at))
        for wanting in [slot for slot in self._slots if slot in cluster.broken]:
            self._swap(wanting)

    def returned(self, name: str) -> None:
        super().returned(name)
        if self._leader is None or name in self.held:
            if self._leader is not None and name in self._group.alive:
                self._tell(name, Readiness(""))
        elif self._unmet:
            self._unmet -= 1
            self._soon(self.world.times.fetch_s, self._arrive)


_LINK: Final = RankError("DistBackendError", "NCCL error: remote process exited or there was a network error", "")


def hang_limit_s(step_s: float) -> float:
    """The limit of ranks whose steps take ``step_s``, all of it in one phase."""
    return max(HangLimits().steady_s, FACTOR * step_s)


def hang_judged_s(step_s: float) -> float:
    """From the last step to the judgement."""
    return hang_limit_s(step_s) - EARLY_S


def failed(rank: int, fault: SimulatedFault, step: int | None, *, at_once: bool) -> FailedRank:
    """How ``fault`` ends ``rank``, after ``step`` or, ``at_once``, before its first step."""
    if fault.effect == "process":
        return FailedRank(Failure(rank, "signal SIGSEGV", "signal", 0.0, step))
    if fault.effect == "link":
        return FailedRank(Failure(rank, "exit code 1", "communication", 0.0, step, error=_LINK))
    error = RankError(fault.kind, "CUDA initialization" if at_once else "CUDA error", "")
    return FailedRank(Failure(rank, "exit code 1", "hardware", 0.0, step, error=error, at_once=at_once))


def hung_statuses(generation: int, slots: Sequence[str], hung: str, step: int, step_s: float) -> list[RankStatuses]:
    """What each node of ``slots`` answers: the rank of ``hung`` is in its backward pass, all others wait for it."""
    limit_s = hang_limit_s(step_s)
    stuck_s = hang_judged_s(step_s)
    return [
        RankStatuses(
            generation,
            (
                RankStatus(
                    rank, phase := "backward" if name == hung else "collective", phase, step, stuck_s, stuck_s,
                    limit_s, "S",
                ),
            ),
            None,
        )
        for rank, name in enumerate(slots)
    ]  # fmt: skip


class SimulatedGroup:
    """``opsd.launch.claims.election.LeaderView`` in which every claim holds; the callbacks are those of the job.

    ``ended`` gets the exit code, the nodes that the next start is to avoid, and what it is to have as ``inherited``.
    """

    def __init__(
        self,
        names: Iterable[str],
        proposed: Callable[[Plan], None],
        ordered: Callable[[StopOrdered], None],
        ended: Callable[[int, tuple[str, ...], Mapping[str, Any]], None],
        inherited: Mapping[str, Any],
    ) -> None:
        self.plan: Plan | None = None
        self.begun = False
        self.leaderless_s = 0.0
        self.inherited = inherited
        self.alive = {name: _member(name) for name in names}
        self.own = next(iter(self.alive))
        self._proposed, self._ordered, self._ended = proposed, ordered, ended

    def join(self, name: str) -> Member:
        """The launcher of ``name`` has come."""
        self.alive[name] = _member(name)
        return self.alive[name]

    def succeed(self, leaderless_s: float, dead: Collection[str]) -> None:
        """The leader is gone: the next node leads, and knows what the newest claim says.

        Those of ``dead`` are lost with it, which nobody has been told of yet: they elect nobody.
        """
        assert self.plan is not None
        heirs = [name for name in (*self.plan.slots, *self.alive) if name in self.alive]
        self.own = next((name for name in heirs if name not in dead), heirs[0])
        self.leaderless_s = leaderless_s
        self.plan = Plan.from_json(self.plan.number, json.loads(json.dumps(self.plan.to_json())))

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        number = self.plan.number + 1 if self.plan is not None else 1
        self.plan = Plan(number, self.own, slots, tuple(self.alive.values()), dict.fromkeys(self.alive, 1), payload)
        self.begun = False
        self._proposed(self.plan)

    def end(self, code: int, reason: str, lost: Sequence[str], unfit: Sequence[str], memory: Mapping[str, Any]) -> None:
        self._ended(code, (*lost, *unfit), memory)

    def tell_all(self, body: Body) -> None:
        order = CODEC.decode(body)
        if isinstance(order, StopOrdered):
            self._ordered(order)


def _member(name: str) -> Member:
    return Member(name, name, 1)


class SimulatedLog:
    """``RunEventLog`` that hands each event to ``seen``."""

    def __init__(self, seen: Callable[[Mapping[str, Any]], None]) -> None:
        self.generation = 0
        self._seen = seen

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        self._seen({"event": event, **fields})

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        self._seen(record)
