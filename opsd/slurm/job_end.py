"""The end of a job whose batch script may be dead: a requeue, or the exit code of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from opsd import exitcodes
from opsd.slurm.allocation import Allocation
from opsd.slurm.job_state import is_alive
from opsd.slurm.port import Slurm, SlurmDenied, SlurmMissing, SlurmRejected
from opsd.slurm.requeue import ExcludedNodes
from opsd.slurm.requeue_helper import Cancelled, requeue_from_inside
from opsd.slurm.spare_jobs import cancel_spares


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
