"""The Slurm port: its values, its errors, and the one Protocol that the rest of opsd uses.

There are two implementations: ``CommandSlurm`` in opsd.slurm.commands runs Slurm's commands, ``PyslurmSlurm`` in
opsd.slurm.connect uses pyslurm. Every method returns or raises within the deadline of its implementation. Errors are
always a ``SlurmError`` with a one-sentence message; the subclass tells whether a retry makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol


class SlurmError(Exception):
    """Slurm could not do what was requested; the message says why in one sentence."""


class SlurmUnavailable(SlurmError):
    """The controller (or munge) is down or slow. The request may be repeated; it may have been carried out already."""


class SlurmMissing(SlurmError):
    """This machine has no Slurm commands, no configuration for them, or an unsupported version."""


class SlurmDenied(SlurmError):
    """This user is not permitted to do that."""


class SlurmRejected(SlurmError):
    """Slurm refused the request: no such job, an impossible state, an unknown partition."""


class Version(NamedTuple):
    """Year, month and patch of a Slurm release, for instance (25, 11, 2)."""

    year: int
    month: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.year:02d}.{self.month:02d}.{self.patch}"


OLDEST = Version(22, 5)
"""The oldest release that opsd is tested with."""


_BLOCKING: Final = frozenset(
    {"drain", "fail", "not_responding", "maintenance", "power_down", "powered_down", "powering_down", "invalid_reg"}
)
_SOON_ELSEWHERE: Final = frozenset(
    {"reserved", "completing", "reboot_requested", "reboot_issued", "power_up", "powering_up", "blocked"}
)
"""Flags of idle nodes that no job gets at once, as in Slurm's slurm_protocol_defs.c: an epilog that has not ended, a
reboot that waits for the node, one that boots in the cloud, one that another job's exclusive use blocks."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the controller knows it.

    ``state`` is Slurm's base state in lower case (idle, allocated, mixed, down, error, future, unknown), ``flags`` are
    what ``scontrol show node`` appends to it with plus signs (drain, not_responding, completing, maintenance, reserved
    …). ``reason`` is "" if none is set; ``reason_by`` is a user name and ``reason_at`` epoch seconds.
    """

    name: str
    state: str
    flags: frozenset[str] = frozenset()
    reason: str = ""
    reason_by: str = ""
    reason_at: float | None = None

    @property
    def busy(self) -> bool:
        """Whether jobs hold the node."""
        return self.state in ("allocated", "mixed") or "completing" in self.flags

    @property
    def out_of_service(self) -> bool:
        """Whether it is drained or down."""
        return self.state == "down" or "drain" in self.flags

    @property
    def free(self) -> bool:
        """Whether a job that may use any node could have it at once."""
        return self.state == "idle" and self.usable and not self.flags & _SOON_ELSEWHERE

    @property
    def usable(self) -> bool:
        """Whether the node could get a job now, or once its present jobs end."""
        return self.state in ("idle", "allocated", "mixed") and not self.flags & _BLOCKING


ENDED: Final = frozenset({
    "boot_fail", "cancelled", "completed", "deadline", "failed", "node_fail", "out_of_memory", "preempted", "timeout",
})  # fmt: skip
"""The states of a job that is over, which a controller shows for a while (JOB STATE CODES of squeue)."""


@dataclass(frozen=True, slots=True)
class Job:
    """A Slurm job that the controller still knows. Times are epoch seconds, None if Slurm has none.

    ``id`` is the raw job id (unique also for array tasks), ``state`` Slurm's in lower case (pending, running,
    completing …), ``reason`` why it is pending or failed. ``nodes`` is empty unless nodes are allocated.
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
class Given:
    """The resources of a job on one node. ``gpus`` are indexes of the node's GRES; none if it has no GPU there.

    None where Slurm does not number them (a ``gres.conf`` without files) or its answer is ambiguous. ``sluid`` is the
    other name of this start of the job, "" where Slurm does not tell it (before 25.11) or its answer is ambiguous.
    ``shares`` are the GPUs of which it has a part (gres/shard, gres/mps); others may have parts of the same.
    """

    gpus: frozenset[int] | None
    sluid: str = ""
    shares: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class JobDetails:
    """Slurm's details of one job.

    ``gres`` has what it was given on each node: the number by GRES and type, for instance 8 of "gpu:h100".
    ``requeues`` is whether it may be requeued, None if Slurm does not say. A job that is not ``batch`` has no script.
    ``command`` is the file of the script, ``submitted`` the command line of sbatch; "" where Slurm has none (24.11 has
    no second one).
    """

    gres: Mapping[str, Mapping[str, int]]
    requeues: bool | None = None
    batch: bool = True
    heterogeneous: bool = False
    command: str = ""
    submitted: str = ""


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
    """A partition. If Slurm preempts by partition, jobs of a higher ``tier`` preempt those of a lower one.

    ``state`` is up, or down, drain or inactive, in which no job starts.
    ``preempt_mode`` is what happens to its own jobs then, in Slurm's spelling (REQUEUE, CANCEL, OFF …), after
    ``grace_s`` seconds.
    """

    name: str
    nodes: tuple[str, ...]
    tier: int
    preempt_mode: str
    grace_s: int = 0
    state: str = "up"


NodeUpdate = Literal["drain", "resume", "down"]


class SlurmNodes(Protocol):
    """The nodes of the cluster: all that the rules for draining and returning need."""

    def nodes(self, names: Sequence[str] = ()) -> Sequence[Node]:
        """The nodes with these names, or all. Unknown names and nodes in no partition are left out, as in sinfo."""

    def update_nodes(self, names: Sequence[str], update: NodeUpdate, reason: str = "") -> None:
        """Drain, resume or down nodes. ``reason`` is required for drain and down."""

    def comments(self, names: Sequence[str] = ()) -> Mapping[str, str]:
        """The comment of each of these nodes, or of all; "" if there is none. Unknown names are left out."""

    def set_comment(self, name: str, text: str) -> None:
        """Replace a node's comment. It survives drains and restarts of the controller."""


class Slurm(SlurmNodes, Protocol):
    """What opsd asks of Slurm. All methods raise SlurmError within the deadline of the implementation.

    ``update_nodes`` has no safeguards: use the functions of ``opsd.slurm.drain``, which leave alone nodes that others
    have drained.
    """

    @property
    def version(self) -> Version:
        """The release of this machine's Slurm."""

    def responds(self) -> bool:
        """Whether a controller answers. Notices sooner than the other methods if none does."""

    def configuration(self) -> Mapping[str, str]:
        """The controller's settings, for instance {"SlurmdTimeout": "300 sec"}."""

    def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
        """The jobs with these ids, or on one node, or all that this user may see. Unknown ids are left out."""

    def steps(self, job: int) -> Mapping[str, frozenset[str]]:
        """The nodes of each of the job's steps, by its number, without batch script and external step.

        Empty for a job that is not running.
        """

    def given(self, job: int, node: str) -> Given:
        """The job's resources on ``node``."""

    def details(self, job: int) -> JobDetails:
        """More about a job that the controller still knows."""

    def script(self, job: int) -> str:
        """The batch script of this user's job."""

    def complete(self, job: int, code: int) -> None:
        """End a running job as if its batch script had exited with ``code``. Its owner may do that from any node."""

    def reboot(self, name: str, reason: str) -> None:
        """Have a node rebooted once its jobs have ended; it is down for ``reason`` then, until somebody resumes it.

        Slurm drains it until then, and adds to the reason what becomes of the reboot. Needs RebootProgram in its
        configuration.
        """

    def requeue(self, job: int) -> None:
        """Stop the job and requeue it. Slurm delays its start by two minutes unless ``set_start_time`` is called."""

    def set_start_time(self, job: int, at: float | None = None) -> None:
        """Let a pending job start from the epoch second ``at`` on; None is now.

        Call it once a requeued job is pending: Slurm then sets its own delay and overwrites any earlier value.
        """

    def start_after(self, job: int, other: int) -> None:
        """Keep a pending job from starting until the job ``other`` has ended in any way and its nodes are free.

        It replaces the dependencies of ``job``, of which Slurm keeps none once the job has run.
        """

    def exclude(self, job: int, names: Sequence[str], at: float) -> None:
        """Exclude these nodes from a pending job, in addition to those excluded before; ``at`` is stored with them.

        Slurm holds a job that cannot run without them (its reason is then BadConstraints).
        """

    def excluded(self, job: int) -> Mapping[str, float]:
        """The nodes excluded with ``exclude``, also by other processes, each with its ``at``; not the user's own."""

    def include(self, job: int, names: Sequence[str]) -> None:
        """Undo ``exclude``; nodes that the user excluded stay excluded."""

    def summarize(self, job: int, text: str, topic: str = "run") -> None:
        """Put ``text`` into the job's AdminComment, or its Comment if this user may not.

        It replaces opsd's earlier text there about the same ``topic``. A topic is a word, or a word and a node's name,
        of which the newest few are kept. All other text stays.
        """

    def shrink(self, job: int, names: Sequence[str]) -> None:
        """Reduce a running job to the nodes ``names``, which include its batch host. The job's owner may do that."""

    def release(self, job: int) -> None:
        """Release a held job."""

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        """Submit a batch script with sbatch options; returns the job id."""

    def cancel(self, job: int) -> None:
        """Cancel a job. A job that has already ended is not an error."""

    def partitions(self) -> Sequence[Partition]:
        """All partitions that this user may see."""

    def reservations(self) -> Sequence[Reservation]:
        """All reservations."""

    def reserve(self, name: str, settings: Mapping[str, str]) -> None:
        """Create a reservation from settings named as in scontrol, for instance {"NodeCnt": "2", "Users": "root"}."""

    def unreserve(self, name: str) -> None:
        """Delete a reservation."""
