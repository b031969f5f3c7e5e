"""One run, from the first second to the last, on one draw of faults."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opsd.settings.policy import PolicySettings
from opsd.simulate.account import Account, Bucket
from opsd.simulate.cluster import NO_TOPOLOGY, Cluster, VirtualLoop
from opsd.simulate.faults import HOUR_S, PASSING, SEVERITY, SimulatedFault, level_at
from opsd.simulate.job import KEEP, STEP_S, Job, Policy, Times, World
from opsd.simulate.supervised import SupervisedJob
from opsd.slurm.topology import Topology


@dataclass(frozen=True, slots=True)
class Setup:
    """A run on ``nodes`` nodes of a cluster with ``spares`` more, for ``seconds``.

    A checkpoint every ``interval_s`` seconds of work stops the ranks for ``stall_s``. ``per_switch`` and ``topology``
    as in ``Cluster``. The length of a step, ``step_s``, decides only how often ranks can stop at a step boundary, and
    what counts as progress, and how long a hang takes to be one. ``keep`` checkpoints are kept.
    """

    nodes: int
    spares: int
    seconds: float
    interval_s: float
    stall_s: float
    gpus: int = 8
    times: Times = field(default_factory=Times)
    rules: PolicySettings = field(default_factory=PolicySettings)
    per_switch: int = 0
    topology: Topology = NO_TOPOLOGY
    step_s: float = STEP_S
    keep: int = KEEP


@dataclass(frozen=True, slots=True)
class Played:
    """What became of one run. ``gpu_hours_lost`` by the kind of fault."""

    seconds: float
    buckets: Mapping[Bucket, float]
    outages: int
    spares_in_use: tuple[int, int]
    """Half and 99 % of the time at most so many places of spares were taken by nodes that are out of service."""
    interruptions: int
    swaps: int
    requeues: int
    resubmissions: int
    drains_refused: int
    corruptions_kept: int
    """See ``Job.corruptions_kept``."""
    longest_standstill_s: float
    gpu_hours_lost: Mapping[str, float]
    hops: Sequence[tuple[float, float]]
    """See ``Job.hops``."""

    @property
    def ettr(self) -> float:
        """Productive time per wall-clock time."""
        return self.buckets["productive"] / self.seconds


class Play:
    """A cluster and a job in virtual time."""

    def __init__(self, policy: Policy, setup: Setup) -> None:
        self._setup = setup
        self._loop = VirtualLoop()
        self._account = Account(setup.interval_s, setup.stall_s)
        size = setup.nodes + setup.spares
        self._cluster = Cluster(
            size, self._loop, setup.rules, setup.times.person_s, self._returned, setup.per_switch, setup.topology
        )
        world = World(
            self._loop, self._cluster, self._account, setup.times, policy, setup.nodes, setup.interval_s, setup.stall_s,
            setup.step_s, setup.keep,
        )  # fmt: skip
        self._job: Job = SupervisedJob(world) if policy.opsd else UnsupervisedJob(world)
        self._outages = 0

    def run(self, faults: Sequence[SimulatedFault]) -> Played:
        setup, account = self._setup, self._account
        for fault in faults:
            self._loop.later(fault.start_s, lambda fault=fault: self.begin(fault))  # type: ignore[misc]
        self._loop.later(0.0, self._job.submit)
        self._loop.run(setup.seconds)
        account.close(setup.seconds)
        self._cluster.settle()
        out = self._cluster.out_s
        return Played(
            setup.seconds,
            account.seconds,
            self._outages,
            (min(setup.spares, level_at(out, 0.5)), min(setup.spares, level_at(out, 0.99))),
            account.interruptions,
            self._job.swaps,
            self._job.requeues,
            self._job.resubmissions,
            self._cluster.drains_refused,
            self._job.corruptions_kept,
            account.longest_s,
            {kind: lost_s * setup.nodes * setup.gpus / HOUR_S for kind, lost_s in account.lost_s.items()},
            self._job.hops,
        )

    @property
    def places(self) -> Sequence[str]:
        """The nodes that have ranks, or had them last in this start of the job, by place."""
        return self._job.places

    def node(self, name: str) -> int:
        """The number of the node ``name``."""
        return self._cluster.names.index(name)

    def begin(self, fault: SimulatedFault) -> None:
        match fault.effect:
            case "storage" | "controller":
                self._cluster.goes_away(fault.effect, fault)
                self._storage()
            case "corruption":
                name = self._cluster.names[fault.node]
                self._job.corrupt(name)
                self._loop.later(fault.noticed_s, lambda: self._corruption_noticed(name, fault))
            case _:
                self._begin_on_node(fault)

    def _storage(self) -> None:
        left_s = self._cluster.away("storage")[0]
        self._account.storage(self._loop.time(), up=left_s <= 0)
        if left_s > 0:
            self._loop.later(left_s, self._storage)

    def _corruption_noticed(self, name: str, fault: SimulatedFault) -> None:
        self._job.corruption_noticed(name, fault.kind)
        self._begin_on_node(replace(fault, effect="hardware"))

    def _begin_on_node(self, fault: SimulatedFault) -> None:
        name = self._cluster.names[fault.node]
        before = self._cluster.broken.get(name)
        if before is not None and fault.effect not in PASSING:
            if SEVERITY.index(fault.effect) <= SEVERITY.index(before.effect):
                return
            fault = replace(fault, end_s=max(fault.end_s, before.end_s))
        if fault.effect not in PASSING:
            self._outages += before is None and fault.start_s >= 0
            self._cluster.breaks(name, fault)
            self._loop.later(fault.end_s - self._loop.time(), lambda: self._ends(name, fault))
        self._job.fault(name, fault)
        self._job.pace()

    def _ends(self, name: str, fault: SimulatedFault) -> None:
        if self._cluster.broken.get(name) is fault:
            self._cluster.repaired(name)
            self._job.pace()

    def _returned(self, name: str) -> None:
        self._job.returned(name)


class UnsupervisedJob(Job):
    """torchrun, a batch script that requeues itself, and Slurm with its own settings; all ranks end with any node.

    The model is kind to it: somebody drains each faulty node before the job is back, and it saves as often.
    """

    def launch(self, names: list[str]) -> None:
        self._begin_after(self.world.times.torchrun_restart_s + self.world.times.program_s)

    @property
    def ranked(self) -> Collection[str]:
        return self.held

    @property
    def places(self) -> Sequence[str]:
        return sorted(self.held)

    def _begin_after(self, delay_s: float) -> None:
        self.start += 1
        loop, start = self.world.loop, self.start
        self.world.account.idle(loop.time(), "restart")

        def loaded() -> None:
            if start != self.start:
                return
            if (left_s := self.without_storage()) > 0:
                loop.later(left_s, loaded)
            else:
                self.compute(1.0)

        loop.later(delay_s, loaded)

    def stop(self) -> None:
        """Nothing of torchrun outlives its job."""

    def fault(self, name: str, fault: SimulatedFault) -> None:
        account, times = self.world.account, self.world.times
        if name not in self.held or fault.effect == "degraded":
            return
        account.idle(self.world.loop.time(), "detection", fault.kind)
        if fault.effect in ("process", "link"):
            self._begin_after(times.torchrun_restart_s + times.program_s)
            return
        if fault.effect == "hang":
            self.start += 1
            hung = self.start
            ended_s = times.torchrun_restart_s + times.program_s
            self.world.loop.later(
                times.torchrun_hang_s, lambda: self._begin_after(ended_s) if hung == self.start else None
            )
            return
        noticed_s = times.slurm_notices_s if fault.effect == "lost" else times.torchrun_dies_s
        self.start += 1
        self.held = set()
        start = self.start

        def ended() -> None:
            if start == self.start:
                self.avoid(tuple(self.world.cluster.broken), math.inf)
                self.requeue(times.slurm_delay_s)

        self.world.loop.later(noticed_s, ended)
