"""A job in the queue of the simulated cluster, whatever runs in it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from opsd.launch.io.loop import Callback
from opsd.simulate.account import Account
from opsd.simulate.clock import VirtualLoop
from opsd.simulate.cluster import Cluster
from opsd.simulate.faults import Fault
from opsd.simulate.policies import Policy
from opsd.simulate.times import Times
from opsd.slurm.requeue import UNFIT_S

STEP_S = 10.0
"""Of one step, unless a setup has another."""
KEEP = 3
"""Checkpoints; the default of ``checkpoint.keep``."""


@dataclass(frozen=True, slots=True)
class World:
    """What a job lives in. It trains on ``nodes`` nodes; a step takes ``step_s`` seconds on all of them."""

    loop: VirtualLoop
    cluster: Cluster
    account: Account
    times: Times
    policy: Policy
    nodes: int
    interval_s: float
    stall_s: float
    step_s: float
    keep: int
    """Checkpoints that are kept."""


class Job(ABC):
    """Waits for nodes, runs, comes back. Subclasses begin what runs on them, and see the faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.swaps = self.requeues = self.resubmissions = 0
        self.hops: list[tuple[float, float]] = []
        """For each swap the mean hops to the other nodes, of the node that went and of the one that came."""
        self.held: set[str] = set()
        """The nodes of the job."""
        self.start = 0
        """Counts the starts, so that what belongs to an earlier one can be told."""
        self._batch_host = ""
        """The node of the batch script."""
        self._noticed_at = 0.0
        """When Slurm takes the node of the batch script for dead, or has taken it."""
        self._avoided: dict[str, float] = {}
        """Nodes that are in service and that the job must not start on, and until when."""
        self._pending = False
        self.corruptions_kept = 0
        """Corruptions that are older than the oldest checkpoint."""
        self._silent: set[str] = set()
        """Nodes that compute wrong values, as nobody knows."""
        self._clean_s: dict[str, float] = {}
        """By their names, the work that had been saved before they took part."""

    @abstractmethod
    def launch(self, names: list[str]) -> None:
        """The job starts on these nodes."""

    @property
    @abstractmethod
    def ranked(self) -> Collection[str]:
        """The nodes that have ranks."""

    @property
    @abstractmethod
    def places(self) -> Sequence[str]:
        """The nodes that have ranks, or had them last in this start, by place."""

    @property
    def speed(self) -> float:
        """That of the slowest node, for which all others wait."""
        broken = self.world.cluster.broken
        return min((broken[name].speed for name in self.ranked if name in broken), default=1.0)

    def pace(self) -> None:
        """A node has become slow, or is not any longer."""
        self.world.account.pace(self.world.loop.time(), self.speed)

    def compute(self, share: float) -> None:
        """The ranks, on ``share`` of the nodes, have loaded their checkpoint and compute."""
        self.world.account.work(self.world.loop.time(), share, self.speed)
        self._taint()

    def without_storage(self) -> float:
        """For how many seconds more nothing can be loaded or claimed; a start waits so long, for that fault."""
        left_s, kind = self.world.cluster.away("storage")
        if left_s > 0:
            self.world.account.idle(self.world.loop.time(), "restart", kind)
        return left_s

    # -- silent corruption ------------------------------------------------------------------------------------------

    def corrupt(self, name: str) -> None:
        """A node computes wrong values from now on."""
        self._silent.add(name)
        self._taint()

    def _taint(self) -> None:
        account = self.world.account
        if account.working:
            for name in (self._silent & set(self.ranked)) - self._clean_s.keys():
                self._clean_s[name] = account.saved_s(self.world.loop.time())

    def corruption_noticed(self, name: str, kind: str) -> None:
        """A person goes back to the last checkpoint from before it, or to the oldest that is left."""
        world = self.world
        self._silent.discard(name)
        clean_s = self._clean_s.pop(name, None)
        if clean_s is None:
            return
        now, account = world.loop.time(), world.account
        if self.held:
            account.idle(now, "person", kind)
            self.stop()
            self.resubmit()
        oldest_s = account.work_s - (world.keep - 1) * world.interval_s
        self.corruptions_kept += oldest_s > clean_s
        account.rewind(max(clean_s, oldest_s), kind)
        self._clean_s = {other: min(before_s, account.work_s) for other, before_s in self._clean_s.items()}

    @abstractmethod
    def stop(self) -> None:
        """A person cancels the job."""

    @abstractmethod
    def fault(self, name: str, fault: Fault) -> None:
        """``fault`` has begun on a node of the cluster."""

    def submit(self) -> None:
        """Start as soon as there are enough nodes."""
        policy, now = self.world.policy, self.world.loop.time()
        most = self.world.nodes + policy.inside
        avoided = {name for name, until in self._avoided.items() if until > now}
        names = self.world.cluster.usable(but=avoided)
        left_s, kind = self.world.cluster.away("controller")
        self._pending = left_s > 0 or len(names) < policy.least
        if left_s > 0:
            self.world.account.idle(now, "queue", kind)
            self.world.loop.later(left_s, self._submit_again)
        elif self._pending:
            self.world.account.idle(now, "waiting")
        if self._pending:
            return
        self.start += 1
        self.held = set(names[:most])
        self._batch_host = names[0]
        self.launch(names[:most])

    def returned(self, name: str) -> None:
        """A node is back in service."""
        self._avoided.pop(name, None)
        self._submit_again()

    def _submit_again(self) -> None:
        if self._pending:
            self.submit()

    def avoid(self, names: Collection[str], seconds: float = UNFIT_S) -> None:
        """Do not start on ``names`` for ``seconds``, unless they come back from a repair."""
        self._avoided |= dict.fromkeys(names, self.world.loop.time() + seconds)
        if names and seconds < math.inf:
            self.world.loop.later(seconds, self._submit_again)

    def lose(self, name: str) -> None:
        """``name`` is dead. If it has the batch script, no ordinary user can requeue the job before Slurm notices."""
        if name == self._batch_host:
            self._noticed_at = self.world.loop.time() + self.world.times.slurm_notices_s

    def requeue(self, delay_s: float) -> None:
        """Back into the queue, to start after ``delay_s`` seconds at the earliest."""
        self.requeues += 1
        now = self.world.loop.time()
        self._again(max(0.0, self._noticed_at - now) + delay_s, self.submit)
        self.world.account.idle(now, "queue")

    def resubmit(self) -> None:
        """The run has given up: a person finds it, and keeps it off the nodes that are broken then."""
        self.resubmissions += 1
        self._again(self.world.times.person_s, self._found)
        self.world.account.idle(self.world.loop.time(), "person")

    def _found(self) -> None:
        self.avoid(tuple(self.world.cluster.broken), math.inf)
        self.submit()

    def _again(self, delay_s: float, submit: Callback) -> None:
        self.held, self._batch_host = set(), ""
        self.start += 1
        self.world.loop.later(delay_s, submit)
