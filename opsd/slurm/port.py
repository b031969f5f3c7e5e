"""The Slurm port: the values it yields, what can go wrong, and the one Protocol that everything else in opsd sees.

Two implementations exist: ``CommandSlurm`` in opsd.slurm.commands runs Slurm's own commands, ``PyslurmSlurm`` in
opsd.slurm.bindings uses pyslurm. Every method returns or raises within the deadline of its implementation. What it
raises is always a ``SlurmError`` with one sentence; which kind it is says whether trying again makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class SlurmError(Exception):
    """Slurm could not do what it was asked for; the message says why in one sentence."""


class SlurmUnavailable(SlurmError):
    """The controller (or munge) is down or slow. The request may be repeated later; it may have been carried out."""


class SlurmMissing(SlurmError):
    """This machine has no Slurm commands, no configuration for them, or a version that opsd does not know."""


class SlurmDenied(SlurmError):
    """This user may not do that."""


class SlurmRejected(SlurmError):
    """Slurm understood and said no: no such job, an impossible state, an unknown partition."""


class Version(NamedTuple):
    """Year, month and patch of a Slurm release, for instance (25, 11, 2)."""

    year: int
    month: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.year:02d}.{self.month:02d}.{self.patch}"


OLDEST = Version(22, 5)
"""The oldest release that opsd is tested with."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the controller knows it.

    ``state`` is Slurm's base state in lower case (idle, allocated, mixed, down, error, future, unknown), ``flags`` what
    ``scontrol show node`` appends to it with plus signs (drain, not_responding, completing, maintenance, reserved …).
    ``reason`` is "" where none is set; ``reason_by`` is a user name and ``reason_at`` epoch seconds.
    """

    name: str
    state: str
    flags: frozenset[str] = frozenset()
    reason: str = ""
    reason_by: str = ""
    reason_at: float | None = None

    @property
    def busy(self) -> bool:
        """True while jobs hold the node."""
        return self.state in ("allocated", "mixed") or "completing" in self.flags

    @property
    def draining(self) -> bool:
        """True while the node takes no new jobs but still has some."""
        return "drain" in self.flags and self.busy

    @property
    def usable(self) -> bool:
        """True if the node could get a job now or once its present ones end."""
        blocking = {"drain", "fail", "not_responding", "maintenance", "powered_down", "powering_down", "invalid_reg"}
        return self.state in ("idle", "allocated", "mixed") and not self.flags & blocking


@dataclass(frozen=True, slots=True)
class Job:
    """A job that the controller still knows. Times are epoch seconds, None where Slurm has none.

    ``id`` is the raw job id (unique also for array tasks), ``state`` Slurm's in lower case (pending, running,
    completing …), ``reason`` why it is pending or failed. ``nodes`` are expanded and empty unless nodes are allocated.
    """

    id: int
    state: str
    reason: str
    user: str
    partition: str
    nodes: tuple[str, ...]
    batch_host: str
    submitted_at: float | None
    starts_at: float | None
    ends_at: float | None
    restarts: int
    name: str


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation. ``state`` is active or inactive; ``flags`` are in Slurm's spelling (REPLACE_DOWN …)."""

    name: str
    state: str
    nodes: tuple[str, ...]
    node_count: int
    partition: str
    users: tuple[str, ...]
    flags: frozenset[str]
    starts_at: float | None
    ends_at: float | None


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition. Where Slurm preempts by partition, jobs of a lower ``tier`` give way to those of a higher one.

    ``preempt_mode`` is what becomes of its own jobs then, in Slurm's spelling (REQUEUE, CANCEL, OFF …), after
    ``grace_s`` seconds.
    """

    name: str
    nodes: tuple[str, ...]
    tier: int
    preempt_mode: str
    grace_s: int = 0


NodeUpdate = Literal["drain", "resume", "down"]


class Slurm(Protocol):
    """What opsd asks of Slurm. All methods raise SlurmError within the deadline of the implementation.

    ``update_nodes`` does what it is told; use the functions of ``opsd.slurm.drain``, which keep off the nodes that
    other people have drained.
    """

    @property
    def version(self) -> Version:
        """The release of the Slurm installation on this machine."""
        ...

    def responds(self) -> bool:
        """True if a controller answers. Says so sooner than the other methods notice that none does."""
        ...

    def configuration(self) -> Mapping[str, str]:
        """The controller's settings, for instance {"SlurmdTimeout": "300 sec"}."""
        ...

    def nodes(self, names: Sequence[str] = ()) -> Sequence[Node]:
        """The nodes with these names, or all. Left out are unknown names and, as in sinfo, nodes in no partition."""
        ...

    def update_nodes(self, names: Sequence[str], update: NodeUpdate, reason: str = "") -> None:
        """Drain, resume or down nodes. ``reason`` is required for drain and down."""
        ...

    def comments(self, names: Sequence[str] = ()) -> Mapping[str, str]:
        """The comment of each of these nodes, or of all; "" where there is none. Unknown names are left out."""
        ...

    def set_comment(self, name: str, text: str) -> None:
        """Replace the comment of a node. It outlives drains, a restart of the controller and its configuration."""
        ...

    def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
        """The jobs with these ids, or on one node, or all that this user may see. Unknown ids are left out."""
        ...

    def step_nodes(self, job: int) -> frozenset[str]:
        """The nodes on which the job has steps, the batch script left out; none for a job that does not run."""
        ...

    def requeue(self, job: int) -> None:
        """Stop the job and put it back into the queue. Slurm then waits two minutes unless told otherwise."""
        ...

    def set_start_time(self, job: int, at: float | None = None) -> None:
        """Let a pending job start from the epoch second ``at`` on; None is now.

        Wait until a requeued job is pending: Slurm sets its two minutes when it gets there and overwrites what was set
        before.
        """
        ...

    def exclude(self, job: int, names: Sequence[str], at: float) -> None:
        """Keep a pending job off these nodes too, besides those it was told to avoid before; ``at`` is noted for them.

        Slurm holds a job that cannot run without them (its reason is then BadConstraints).
        """
        ...

    def excluded(self, job: int) -> Mapping[str, float]:
        """The nodes of ``exclude``, also of other processes, each with its ``at``; none of the user's own."""
        ...

    def include(self, job: int, names: Sequence[str]) -> None:
        """Undo ``exclude``; nodes that the user excluded stay so."""
        ...

    def shrink(self, job: int, names: Sequence[str]) -> None:
        """Give back the nodes of a running job but ``names``, its batch host among them. Its owner may do that."""
        ...

    def release(self, job: int) -> None:
        """Take the hold off a job."""
        ...

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        """Submit a batch script with the options of sbatch and return the job's id."""
        ...

    def cancel(self, job: int) -> None:
        """Cancel a job. A job that has ended already is not an error."""
        ...

    def partitions(self) -> Sequence[Partition]:
        """All partitions that this user may see."""
        ...

    def reservations(self) -> Sequence[Reservation]:
        """All reservations."""
        ...

    def reserve(self, name: str, settings: Mapping[str, str]) -> None:
        """Create a reservation from settings named as in scontrol, for instance {"NodeCnt": "2", "Users": "root"}."""
        ...

    def unreserve(self, name: str) -> None:
        """Delete a reservation."""
        ...
