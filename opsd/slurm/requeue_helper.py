"""End or requeue a job from within. A small helper job, submitted beforehand, finishes a requeue.

If the batch host is dead, the helper does all of it. The step daemons of the other nodes try six times, two seconds
each (TCPTimeout), to reach the dead srun before they exit, and slurmd checks for that at growing intervals. A requeue
that waits for them takes 21 s in all; one that is requested after they have exited takes 13 s.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsd import exitcodes
from opsd.slurm.allocation import Allocation
from opsd.slurm.hostlist import compress
from opsd.slurm.port import Job, Slurm, SlurmDenied, SlurmError, SlurmMissing, SlurmRejected, SlurmUnavailable
from opsd.slurm.requeue import (
    LIMIT_S,
    POLL_S,
    RETRY_S,
    UNFIT_S,
    ExcludedNodes,
    Helper,
    Requeued,
    is_alive,
    is_stopping,
    never_starts,
    requeue_now,
)
from opsd.slurm.spare_jobs import cancel_spares, output_to

OPSD = (sys.executable, "-P", "-m", "opsd")
DEFER_S = 30.0
"""How long the helper leaves the requeue itself to the job that asked for it, while that job has steps."""
SPARE_MIN = 5
"""Minutes added to the helper's time limit, beyond the time for which it keeps trying."""
LOOK_AGAIN_S = 30.0
"""After the end of the helper, once any scheduler has tried to start the job."""
LOOK_WAITS_MIN = 60
"""For so many minutes the job that looks again waits for a processor; in a full cluster the other one runs by then."""
LOOK_S = 1.0
"""For how long the scheduler is waited for, who tells whether a helper may start."""
_UNSEEN = ("", "None")
_SOON = (*_UNSEEN, "Resources", "Priority")
"""What a helper waits for that starts at the latest on what its job frees."""
START_S = 4.0
"""How long a helper that has to do everything may take to start: a little more than batch_sched_delay."""


def requeue_from_inside(
    slurm: Slurm,
    allocation: Allocation,
    excluded: ExcludedNodes,
    *,
    restarts: int | None = None,
    limit_s: float = LIMIT_S,
    command: Sequence[str] = OPSD,
    log: str = "/dev/null",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = print,
) -> Requeued:
    """``requeue_now`` for a process of the job itself, which ends before the job is back in the queue.

    The rest is left to the helper job. It needs one processor on any node, at the latest one that this job frees, and
    writes its output to ``log``. ``restarts`` is as in ``requeue_now``, but None means this process's own restart
    count. Both keep trying for ``limit_s`` seconds. Returns once the job is stopping, or has to end so that the helper
    can go on: a caller that does not exit then delays the restart. Raises SlurmError, a Refused among them.
    """
    has_helper = False
    restarts = allocation.restarts if restarts is None else restarts
    task = _Task(allocation.job, excluded, restarts, limit_s, tuple(command), log)
    script, options = task.submission(allocation, f"--lead={DEFER_S:g}", f"--log={log}")

    def submit() -> tuple[int, str]:
        _refuse_cancelled(slurm, allocation.job, restarts)
        if slurm.details(allocation.job).requeues is False:
            raise Refused(
                f"job {allocation.job} has --no-requeue, or slurm.conf has JobRequeue=0; submit the job again"
            )
        return _submit_where_it_runs(slurm, script, options, allocation.qos, clock, sleep)

    try:
        helper, waits_for = _repeated(submit, limit_s, clock, sleep, say)
        when = "without delay" if waits_for in _SOON else f"once Slurm starts it ({waits_for})"
        say(f"job {helper} will restart job {allocation.job} {when}")
        has_helper = True
        batch_host_lost = any(job.batch_host in excluded.lost for job in slurm.jobs([allocation.job]))
        if batch_host_lost and _runs(slurm, helper, clock, sleep):
            return Requeued(allocation.job, "running", allocation.restarts, handed_over=True)
    except SlurmUnavailable:
        say("Slurm does not answer; the requeue waits for it")
    except Refused:
        raise
    except SlurmError as error:
        say(f"job {allocation.job} may start up to three minutes late: {error}")
    return requeue_now(
        slurm,
        allocation.job,
        excluded,
        restarts=restarts,
        only_stop=has_helper,
        limit_s=limit_s,
        clock=clock,
        sleep=sleep,
        say=say,
    )


def _submit_where_it_runs(
    slurm: Slurm,
    script: str,
    options: tuple[str, ...],
    qos: str,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> tuple[int, str]:
    """The id of a helper that Slurm may start, and what it waits for, "" if it runs.

    It is tried in the queue of its job, with the ``qos`` of that job as well, and in the cluster's default partition.
    Slurm takes jobs that exceed a limit of their partition or QOS, and never starts them. Raises SlurmRejected if it
    starts nowhere.
    """
    anywhere = tuple(option for option in options if not option.startswith("--partition="))
    reasons = []
    for chosen in dict.fromkeys((options, (*options, *([f"--qos={qos}"] if qos else [])), anywhere)):
        try:
            helper = slurm.submit(script, chosen)
        except (SlurmRejected, SlurmDenied) as error:
            reasons.append(str(error))
            continue
        found = _first_look(slurm, helper, clock, sleep)
        if found is None or not never_starts(found):
            return helper, found.reason if found is not None and found.state == "pending" else ""
        slurm.cancel(helper)
        reasons.append(found.reason)
    raise SlurmRejected(f"Slurm would not start the job that restarts it ({', '.join(dict.fromkeys(reasons))})")


def _first_look(slurm: Slurm, job: int, clock: Callable[[], float], sleep: Callable[[float], object]) -> Job | None:
    """The job once the scheduler has looked at it, or as it is after LOOK_S: until then a pending job has no reason."""
    limit = clock() + LOOK_S
    while True:
        found = next(iter(slurm.jobs([job])), None)
        if found is None or found.state != "pending" or found.reason not in _UNSEEN or clock() > limit:
            return found
        sleep(POLL_S)


def cancel_helpers(slurm: Slurm, job: int) -> None:
    """Cancel the helpers of ``job`` that still wait, since it has started without them. Raises SlurmError."""
    for found in slurm.jobs():
        if found.name == _name_of(job) and found.state == "pending":
            slurm.cancel(found.id)


def _name_of(job: int) -> str:
    """The name of its helpers."""
    return f"opsd-requeue-{job}"


class Refused(SlurmRejected):
    """The job may not be requeued."""


class Cancelled(Refused):
    """It is being cancelled; it must not run again."""


def end_job(
    slurm: Slurm, job: Allocation, code: int, excluded: ExcludedNodes, log: Path, say: Callable[[str], object]
) -> None:
    """Requeue ``job`` without the ``excluded`` nodes if ``code`` asks for it; end it if its batch script is dead.

    A job that cannot be requeued ends with the code as well: nothing else would end it before its time limit. ``log``
    is a file in the run's folder. Raises SlurmError.
    """
    cancel_spares(slurm, log.parent, job, say)
    if code == exitcodes.REQUEUE:
        try:
            requeue_from_inside(slurm, job, excluded, log=str(log), say=say)
            return
        except Cancelled:
            raise
        except (SlurmRejected, SlurmDenied) as error:
            say(f"the job is not put back into the queue: {error}")
    if any(found.batch_host in excluded.lost for found in slurm.jobs([job.job])):
        _complete(slurm, job.job, code, say)


def _complete(slurm: Slurm, job: int, code: int, say: Callable[[str], object]) -> None:
    say(f"the batch script of job {job} died with its node; the job ends with {code}")
    try:
        slurm.complete(job, code)
    except (SlurmMissing, SlurmRejected, SlurmDenied) as error:
        if any(is_alive(found) for found in slurm.jobs([job])):
            say(f"job {job} is cancelled, and jobs that wait for its success do not start: {error}")
            slurm.cancel(job)


def _refuse_cancelled(slurm: Slurm, job: int, restarts: int) -> None:
    """Raise Cancelled if the job is stopping and was not requeued.

    Slurm increments the restart count as soon as a requeue is requested.
    """
    if any(is_stopping(found) and found.restarts <= restarts for found in slurm.jobs([job])):
        raise Cancelled(f"job {job} is being ended and is not put back into the queue")


def _repeated(
    submit: Callable[[], tuple[int, str]],
    limit_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
    say: Callable[[str], object],
) -> tuple[int, str]:
    """The submitted helper, as ``submit`` tells; while the controller is down, ``submit`` is called again.

    If a request was carried out although its answer was lost, the second helper finds nothing to do.
    """
    limit, told = clock() + limit_s, False
    while True:
        try:
            return submit()
        except SlurmUnavailable as error:
            if clock() > limit:
                raise
            if not told:
                say(f"Slurm does not answer and will be asked again: {error}")
            told = True
            sleep(RETRY_S)


def _runs(slurm: Slurm, job: int, clock: Callable[[], float], sleep: Callable[[float], object]) -> bool:
    """Whether ``job`` starts within START_S; if not, the cluster is full."""
    limit = clock() + START_S
    while clock() < limit:
        if any(found.state == "running" for found in slurm.jobs([job])):
            return True
        sleep(POLL_S)
    return False


def helper_of(
    slurm: Slurm,
    own: Allocation,
    job: int,
    excluded: ExcludedNodes,
    *,
    restarts: int | None,
    limit_s: float,
    log: str,
    command: Sequence[str] = OPSD,
) -> Helper:
    """The helper ``own`` of the requeue of ``job``; its ``look_again`` submits a job that does so after it.

    That job writes its output to ``log`` as well. The rest is as in ``requeue_from_inside``.
    """
    task = _Task(job, excluded, restarts or 0, limit_s, tuple(command), log)

    def look_again() -> None:
        script, options = task.submission(own)
        qos = (f"--qos={own.qos}",) if own.qos else ()
        late = (f"--begin=now+{LOOK_AGAIN_S:g}", f"--deadline=now+{task.minutes + LOOK_WAITS_MIN}minutes")
        slurm.submit(script, (*options, *qos, *late))

    return Helper(own.job, look_again)


@dataclass(frozen=True, slots=True)
class _Task:
    """The purpose of a helper job: the requeue of ``job``."""

    job: int
    excluded: ExcludedNodes
    restarts: int
    limit_s: float
    command: tuple[str, ...]
    log: str

    @property
    def minutes(self) -> int:
        """The time limit."""
        waits_s = self.limit_s + (UNFIT_S if self.excluded.unfit else 0.0)
        return math.ceil(waits_s / 60) + SPARE_MIN

    def submission(self, beside: Allocation, *options: str) -> tuple[str, tuple[str, ...]]:
        """The script, with these options of ``opsd requeue``, and the options of sbatch for the queue of ``beside``."""
        excluded = self.excluded
        told = [f"--lost={name}" for name in excluded.lost] + [f"--without={name}" for name in excluded.unfit]
        argv = [
            *self.command, "requeue", str(self.job), f"--restarts={self.restarts}", *options,
            f"--limit={self.limit_s:g}", f"--reason={excluded.reason}", *told,
        ]  # fmt: skip
        chosen = (
            f"--job-name={_name_of(self.job)}", "--nodes=1", "--ntasks=1", "--mem=200M", f"--time={self.minutes}",
            "--no-requeue", "--output=/dev/null", *beside.same_queue,
            *([f"--exclude={compress(excluded.names)}"] if excluded.names else []),
        )  # fmt: skip
        return f"#!/bin/sh\n{output_to(shlex.quote(self.log))}exec {shlex.join(argv)}\n", chosen
