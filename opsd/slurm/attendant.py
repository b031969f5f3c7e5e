"""A requeue that is asked for from within the job: seen through by a small job of its own, submitted before.

Where the batch host has died, that job does all of it. The step daemons of the living nodes then try six times to reach
the dead srun before they are gone, two seconds each (TCPTimeout), and slurmd looks for that at ever longer intervals:
a requeue that has to wait for them takes 21 s, one that is asked for when they are gone 13 s, all in all.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence

from opsd.slurm.allocation import Allocation
from opsd.slurm.hostlist import compress
from opsd.slurm.port import Slurm, SlurmError, SlurmRejected, SlurmUnavailable
from opsd.slurm.requeue import LIMIT_S, POLL_S, RETRY_S, Requeued, Without, is_stopping, requeue_now

LEAD_S = 30.0
"""How long the attendant leaves the requeue itself to the job that asked for it, while that has steps."""
SPARE_MIN = 5
"""Minutes that Slurm gives the attendant beyond the time for which it goes on trying."""
START_S = 4.0
"""How long an attendant may take to start where it is to do all: a little more than Slurm's batch_sched_delay."""


def requeue_from_inside(
    slurm: Slurm,
    allocation: Allocation,
    without: Without,
    *,
    restarts: int | None = None,
    limit_s: float = LIMIT_S,
    command: Sequence[str] = (sys.executable, "-m", "opsd"),
    log: str = "/dev/null",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = print,
) -> Requeued:
    """``requeue_now`` for a process of the job itself, which has to end before the job is back in the queue.

    What is to be done then is left to the attendant, which needs one processor on any node, one of those that this job
    gives back at the latest. Its output goes to ``log``. ``restarts`` is as in ``requeue_now``, but None is as often as
    this process was; both go on trying for ``limit_s`` seconds. Returns as soon as the job is stopping, or is to end
    for the attendant to go on; who then lingers on delays the restart. Raises SlurmError.
    """
    attended = False
    restarts = allocation.restarts if restarts is None else restarts
    try:
        attendant = _submitted(
            slurm,
            _attendant(allocation, without, restarts, limit_s, command, log),
            allocation.job,
            restarts,
            limit_s,
            clock,
            sleep,
            say,
        )
        say(f"job {attendant} will see to it that job {allocation.job} starts again at once")
        attended = True
        if _batch_host_lost(slurm, allocation, without) and _runs(slurm, attendant, clock, sleep):
            return Requeued(allocation.job, "running", allocation.restarts, left=True)
    except SlurmUnavailable:
        say("Slurm does not answer; the requeue waits for it")
    except Cancelled:
        raise
    except SlurmError as error:
        say(f"job {allocation.job} may start up to three minutes late: {error}")
    return requeue_now(
        slurm,
        allocation.job,
        without,
        restarts=restarts,
        brief=attended,
        limit_s=limit_s,
        clock=clock,
        sleep=sleep,
        say=say,
    )


class Cancelled(SlurmRejected):
    """Somebody ends the job for good; it is not to run again, and nobody is to attend to that."""


def _refuse_cancelled(slurm: Slurm, job: int, restarts: int) -> None:
    """Raises Cancelled if the job stops and is not to be run again.

    Slurm counts a restart as soon as it is asked for one, so a job that stops without one has been cancelled.
    """
    if any(is_stopping(found) and found.restarts <= restarts for found in slurm.jobs([job])):
        raise Cancelled(f"job {job} is being ended and is not put back into the queue")


def _submitted(
    slurm: Slurm,
    attendant: tuple[str, tuple[str, ...]],
    job: int,
    restarts: int,
    limit_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
    say: Callable[[str], object],
) -> int:
    """Submit ``attendant`` to ``job``, once the controller is back if it is away: nothing can be done without it.

    A second one, where the first request was carried out unheard, finds nothing left to do.
    """
    limit, told = clock() + limit_s, False
    while True:
        try:
            _refuse_cancelled(slurm, job, restarts)
            return slurm.submit(*attendant)
        except SlurmUnavailable as error:
            if clock() > limit:
                raise
            if not told:
                say(f"Slurm does not answer and will be asked again: {error}")
            told = True
            sleep(RETRY_S)


def _batch_host_lost(slurm: Slurm, allocation: Allocation, without: Without) -> bool:
    return any(job.batch_host in without.lost for job in slurm.jobs([allocation.job]))


def _runs(slurm: Slurm, job: int, clock: Callable[[], float], sleep: Callable[[float], object]) -> bool:
    """True once ``job`` runs, False if it does not soon: the cluster is full."""
    limit = clock() + START_S
    while clock() < limit:
        if any(found.state == "running" for found in slurm.jobs([job])):
            return True
        sleep(POLL_S)
    return False


def _attendant(
    allocation: Allocation,
    without: Without,
    restarts: int,
    limit_s: float,
    command: Sequence[str],
    log: str,
) -> tuple[str, tuple[str, ...]]:
    """The script and the options of the job that attends to a requeue."""
    told = [f"--lost={name}" for name in without.lost] + [f"--without={name}" for name in without.unfit]
    argv = [
        *command, "requeue", str(allocation.job), f"--restarts={restarts}", f"--lead={LEAD_S:g}",
        f"--limit={limit_s:g}", f"--reason={without.reason}", *told,
    ]  # fmt: skip
    options = (
        f"--job-name=opsd-requeue-{allocation.job}", "--nodes=1", "--ntasks=1", "--mem=200M",
        f"--time={math.ceil(limit_s / 60) + SPARE_MIN}",
        "--no-requeue", f"--output={log}", *allocation.same_queue,
        *([f"--exclude={compress(without.names)}"] if without.names else []),
    )  # fmt: skip
    return f"#!/bin/sh\nexec {shlex.join(argv)}\n", options
