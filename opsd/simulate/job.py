"""A job in the queue of the simulated cluster, whatever runs in it; policies for faults, and how long things take."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from opsd.launch.io.loop import Callback
from opsd.simulate.account import Account
from opsd.simulate.cluster import Cluster, VirtualLoop
from opsd.simulate.faults import SimulatedFault
from opsd.slurm.requeue import UNFIT_S

WAIT_S: Final = 300.0
"""``WAIT`` of train-pool.sbatch."""
GROW_S: Final = 60.0
"""Default of ``opsd launch --grow-after``."""
NAMES: Final = ("torchrun", "requeue", "hot", "pool", "shrink")


@dataclass(frozen=True, slots=True)
class Policy:
    """``inside`` spares are in the job; ``least`` nodes are enough to go on.

    With ``fetch`` a node is fetched for a lost one, for which a run that has too few waits ``wait_s`` seconds. After
    ``grow_s`` seconds of missed work a run takes in more nodes. Without ``opsd`` it is torchrun and sbatch --requeue.
    """

    name: str
    told: str
    least: int
    inside: int = 0
    wait_s: float = 0.0
    grow_s: float = 0.0
    fetch: bool = False
    opsd: bool = True


def policy(name: str, nodes: int, *, inside: int, least: int) -> Policy:
    """The policy ``name`` for a run of ``nodes`` nodes; ``inside`` is for hot, ``least`` for shrink."""
    match name:
        case "torchrun":
            return Policy(name, "torchrun and sbatch --requeue, no opsd", nodes, opsd=False)
        case "requeue":
            return Policy(name, "back into the queue (train-requeue.sbatch)", nodes)
        case "hot":
            return Policy(name, f"{inside} of the spares inside the job (train-spares.sbatch)", nodes, inside=inside)
        case "pool":
            return Policy(name, "spares fetched from a pool (train-pool.sbatch)", nodes, wait_s=WAIT_S, fetch=True)
        case "shrink":
            told = f"the same, going on with {least} nodes or more"
            return Policy(name, told, least, wait_s=WAIT_S, grow_s=GROW_S, fetch=True)
    raise ValueError(f"there is no policy {name!r}; there are {', '.join(NAMES)}")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. Those of opsd are of docs/benchmarks.md: a tiny model on three nodes, two cores.

    ``program_s`` is what the start of a program takes beyond that, at its real size: loading, communicators, the first
    step. It is not in those benchmarks, and the same for every policy.
    """

    program_s: float = 0.0
    silence_s: float = 1.5
    """A node is lost after so much silence (`opsd bench swap`, --node-timeout)."""
    swap_s: float = 2.15
    """From the last step to the first one with a spare (`opsd bench swap`, p50), the silence included."""
    closed_s: float = 0.0
    """Until a launcher that dies while its node lives is missed, by the end of its connections."""
    succession_s: float = 2.31
    """The same where the leader's node is lost (`opsd bench swap`, p50)."""
    requeue_s: float = 10.79
    """The same without a spare, through Slurm's queue (`opsd bench swap`, p50)."""
    fetch_s: float = 8.64
    """From the request for a spare to its launcher; taken to be as long as that of a requeue."""
    noticed_s: float = 0.024
    """A rank's death (`opsd bench restart`)."""
    restart_s: float = 0.10
    """From a rank's death to the first step on the same nodes (`opsd bench restart`)."""
    agent_s: float = 2.8
    """A fault that kills no rank is found by the agent (`opsd bench detect`, median)."""
    person_s: float = 2334.0
    """Until a person resubmits a run that has ended, or returns a node that opsd would not (OLMo x Lambda on Slurm,
    mean of restarts: 38 min 54 s)."""
    torchrun_restart_s: float = 1.67
    """torchrun, a rank killed (`opsd bench restart`, beside)."""
    torchrun_dies_s: float = 72.0
    """Agents of torchrun notice a dead one after 12 s and end after a wait of 60 s for the store (measured)."""
    torchrun_hang_s: float = 600.0
    """Without opsd NCCL's watchdog ends a hang (torch's default timeout of a process group with NCCL)."""
    slurm_notices_s: float = 393.0
    """Slurm sets a dead node down, with its own settings (docs/slurm.md)."""
    slurm_delay_s: float = 120.0
    """Slurm holds a requeued job back (opsd/slurm/requeue.py)."""

    @property
    def change_s(self) -> float:
        """From the leader's decision to the start of the program, with another node among the ranks."""
        return self.swap_s - self.silence_s

    @property
    def queue_s(self) -> float:
        """From the end of a start to the launchers of the next."""
        return self.requeue_s - self.swap_s

    def generation_s(self, *, changed: bool, succeeded: bool) -> float:
        """From the leader's decision to the start of the program."""
        if changed:
            return self.change_s + (self.succession_s - self.swap_s if succeeded else 0.0)
        return self.restart_s - self.noticed_s


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
    def fault(self, name: str, fault: SimulatedFault) -> None:
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
