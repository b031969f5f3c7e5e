"""What the state of a Slurm job means for a requeue. Pure."""

from __future__ import annotations

import re
from typing import Literal

from opsd.slurm.port import Job, SlurmRejected

_ALIVE = ("running", "configuring", "suspended", "stopped", "resizing", "signaling", "stage_out")
_STOPPING = ("completing", "requeued", "requeue_fed")
_HELD_STATES = ("requeue_hold", "special_exit")
_HOLD = re.compile(r"h[eo]ld", re.IGNORECASE)
"""In the reasons of pending jobs: JobHeldUser, JobHoldMaxRequeue, "job requeued in held state" …

BadConstraints does not match: Slurm itself holds such a job, because of its excluded nodes.
"""

_HOLDS = (
    ("launch", "Slurm has set, because the start of the job failed (a prolog for instance)"),
    ("maxrequeue", "Slurm has set, because the job was requeued too often (MaxBatchRequeue)"),
    ("requeued", "somebody has set (scontrol requeuehold)"),
    ("requeue_hold", "somebody has set (scontrol requeuehold)"),
    ("heldadmin", "an administrator has set"),
)
"""In reasons and states of held jobs, and whose hold it is."""

_NEVER = re.compile(
    r"(QOS|Assoc)(\w*PerJob|Min|\w*Wall|NotAllowed)|Partition(NodeLimit|TimeLimit|Config|Down|Inactive)|BadConstraints"
    r"|DependencyNeverSatisfied|JobHeld|Invalid|AccountNotAllowed|DeadLine|MaxMemPerLimit|ReservationDeleted"
)
"""Not a limit on what several jobs have together: the end of one of them makes room."""

NextStep = Literal["requeue", "wait", "held", "start", "done"]


def next_step(job: Job, restarts: int) -> NextStep:
    """The next step of a requeue that was decided when the job had been restarted ``restarts`` times.

    Raises SlurmRejected if the job has ended.
    """
    if job.state in _STOPPING:
        return "wait"
    if job.state in _HELD_STATES or (job.state == "pending" and _HOLD.search(job.reason)):
        return "held"
    if job.state == "pending":
        return "start"
    if job.state in _ALIVE:
        return "requeue" if job.restarts <= restarts else "done"
    raise SlurmRejected(f"job {job.id} has ended ({job.state}) and cannot be put back into the queue; submit it again")


def whose_hold(reason: str) -> str:
    """Who has set a hold that Slurm gives ``reason`` for, as the end of "a hold that …"."""
    known = reason.lower()
    return next((whose for word, whose in _HOLDS if word in known), "somebody has set")


def failed_to_launch(job: Job) -> bool:
    """Whether the hold is Slurm's own, after a start that failed: no person has asked for it."""
    return job.state == "pending" and "launch" in job.reason.lower() and _HOLD.search(job.reason) is not None


def never_starts(job: Job) -> bool:
    """Whether a pending job waits for what no other job's end brings: a limit, or nodes that there are not."""
    return job.state == "pending" and _NEVER.match(job.reason) is not None


def is_alive(job: Job) -> bool:
    """Whether the job runs or is about to, and is not being stopped."""
    return job.state in _ALIVE


def is_stopping(job: Job) -> bool:
    """Whether Slurm is stopping the job, for good or for a requeue."""
    return job.state in _STOPPING
