"""Finds out what a requeue would do, and which permission is missing, without changing anything."""

from __future__ import annotations

from dataclasses import dataclass

from opsd.slurm.check import may_update_nodes
from opsd.slurm.job_state import failed_to_launch, next_step
from opsd.slurm.port import Job, Slurm, SlurmRejected
from opsd.slurm.requeue import ExcludedNodes

NEEDED = "root, SlurmUser or an operator (sacctmgr)"


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be done, in one or two sentences; ``possible`` if this user may do it."""

    possible: bool
    text: str


def preview(slurm: Slurm, number: int, excluded: ExcludedNodes, user: str) -> Preview:
    """The actions of ``requeue_now`` for ``user``. Raises SlurmError, also for a job that cannot be requeued."""
    found = slurm.jobs([number])
    if not found:
        raise SlurmRejected(f"there is no job {number} that waits or runs and that this user may see")
    job, operator = found[0], may_update_nodes(slurm)
    step = next_step(job, job.restarts)
    if not operator and job.user != user:
        return Preview(False, f"job {number} is {job.user}'s: {user} may not requeue it, that needs {NEEDED}")
    if step == "held" and failed_to_launch(job):
        return Preview(True, f"job {number} is on hold because its start failed: would release it once")
    if step == "held":
        return Preview(False, f"job {number} is on hold ({job.reason or job.state}): would leave it so")
    if step != "requeue":
        return Preview(True, f"job {number} is {job.state}: would {_WOULD[step]}")
    return Preview(True, f"would {_nodes(job, excluded, operator)}requeue job {number} and have it start at once")


_WOULD = {
    "wait": "wait until it has stopped and have it start at once",
    "start": "have it start at once",
    "done": "leave it alone",
}


def _nodes(job: Job, excluded: ExcludedNodes, operator: bool) -> str:
    lost = [name for name in excluded.lost if name in job.nodes]
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
