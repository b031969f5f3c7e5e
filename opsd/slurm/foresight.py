"""What a requeue would do, and which right is missing for it: found out by asking, without changing anything."""

from __future__ import annotations

from dataclasses import dataclass

from opsd.slurm.check import may_update_nodes
from opsd.slurm.port import Job, Slurm, SlurmRejected
from opsd.slurm.requeue import Without, next_move

NEEDED = "root, SlurmUser or an operator (sacctmgr)"


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What would be done, in one sentence or two; ``possible`` if this user may."""

    possible: bool
    text: str


def foresee(slurm: Slurm, number: int, without: Without, user: str) -> Foreseen:
    """What ``requeue_now`` would do for ``user``. Raises SlurmError, also for a job that cannot be requeued."""
    found = slurm.jobs([number])
    if not found:
        raise SlurmRejected(f"there is no job {number} that waits or runs and that this user may see")
    job, operator = found[0], may_update_nodes(slurm)
    move = next_move(job, job.restarts)
    if not operator and job.user != user:
        return Foreseen(False, f"job {number} is {job.user}'s: {user} may not requeue it, that needs {NEEDED}")
    if move == "held":
        return Foreseen(False, f"job {number} is on hold ({job.reason or job.state}): would leave it so")
    if move != "requeue":
        return Foreseen(True, f"job {number} is {job.state}: would {_WOULD[move]}")
    return Foreseen(True, f"would {_nodes(job, without, operator)}requeue job {number} and have it start at once")


_WOULD = {
    "wait": "wait until it has stopped and have it start at once",
    "start": "have it start at once",
    "done": "leave it alone",
}


def _nodes(job: Job, without: Without, operator: bool) -> str:
    lost = [name for name in without.lost if name in job.nodes]
    if not lost:
        return ""
    if operator:
        return f"take {', '.join(lost)} down, "
    if job.batch_host in lost:
        return (
            f"wait until Slurm notices that {job.batch_host}, the node of the batch script, is dead (SlurmdTimeout): "
            f"taking it down needs {NEEDED}; before that "
        )
    return f"shrink the job to its other nodes, since taking {', '.join(lost)} down needs {NEEDED}, "
