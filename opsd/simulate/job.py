"""A job in the queue of the simulated cluster, whatever runs in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from opsd.launch.io.loop import Callback
from opsd.simulate.account import Account
from opsd.simulate.clock import VirtualLoop
from opsd.simulate.cluster import Cluster
from opsd.simulate.faults import Fault
from opsd.simulate.policies import Policy
from opsd.simulate.times import Times

STEP_S = 10.0
"""Of one step; decides only how often ranks can stop at a step boundary, and what counts as progress."""


@dataclass(frozen=True, slots=True)
class World:
    """What a job lives in. It trains on ``nodes`` nodes."""

    loop: VirtualLoop
    cluster: Cluster
    account: Account
    times: Times
    policy: Policy
    nodes: int
    stall_s: float


class Job(ABC):
    """Waits for nodes, runs, comes back. Subclasses begin what runs on them, and see the faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.swaps = self.requeues = self.resubmissions = 0
        self.held: set[str] = set()
        """The nodes of the job."""
        self.start = 0
        """Counts the starts, so that what belongs to an earlier one can be told."""
        self._pending: tuple[Collection[str], bool] | None = None

    @abstractmethod
    def launch(self, names: list[str]) -> None:
        """The job starts on these nodes."""

    @property
    @abstractmethod
    def ranked(self) -> Collection[str]:
        """The nodes that have ranks."""

    @property
    def speed(self) -> float:
        """That of the slowest node, for which all others wait."""
        broken = self.world.cluster.broken
        return min((broken[name].speed for name in self.ranked if name in broken), default=1.0)

    def pace(self) -> None:
        """A node has become slow, or is not any longer."""
        self.world.account.pace(self.world.loop.time(), self.speed)

    @abstractmethod
    def fault(self, name: str, fault: Fault) -> None:
        """``fault`` has begun on a node of the cluster."""

    def submit(self, avoid: Collection[str] = (), *, strictly: bool = False) -> None:
        """Start as soon as there are enough nodes; on those of ``avoid`` only if it must, and not if ``strictly``."""
        policy = self.world.policy
        most = self.world.nodes + policy.inside
        least = min(policy.least + policy.inside, most)
        usable = self.world.cluster.usable()
        names = [name for name in usable if name not in avoid]
        if len(names) < least and not strictly:
            names += [name for name in usable if name in avoid]
        if len(names) < least:
            self._pending = (avoid, strictly)
            self.world.account.idle(self.world.loop.time(), "waiting")
            return
        self._pending = None
        self.start += 1
        self.held = set(names[:most])
        self.launch(names[:most])

    def returned(self, name: str) -> None:
        """A node is back in service."""
        if self._pending is not None:
            avoid, strictly = self._pending
            self.submit(set(avoid) - {name}, strictly=strictly)

    def requeue(self, delay_s: float, avoid: Collection[str], *, strictly: bool = False) -> None:
        """Back into the queue, to start after ``delay_s`` seconds at the earliest."""
        self.requeues += 1
        self._again(delay_s, lambda: self.submit(avoid, strictly=strictly))
        self.world.account.idle(self.world.loop.time(), "queue")

    def resubmit(self) -> None:
        """The run has given up: a person finds it, and keeps it off the nodes that are broken then."""
        self.resubmissions += 1
        self._again(self.world.times.person_s, lambda: self.submit(tuple(self.world.cluster.broken), strictly=True))
        self.world.account.idle(self.world.loop.time(), "person")

    def _again(self, delay_s: float, submit: Callback) -> None:
        self.held = set()
        self.start += 1
        self.world.loop.later(delay_s, submit)
