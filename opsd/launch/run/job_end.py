"""What a launcher does with the Slurm job at the end of its run, where nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opsd import exitcodes
from opsd.launch.io.reporting import print_message
from opsd.launch.io.run_log import BATCH_HOST
from opsd.slurm.allocation import AllocationError, allocation, in_job
from opsd.slurm.attendant import requeue_from_inside
from opsd.slurm.connect import choose
from opsd.slurm.fetch import dismiss
from opsd.slurm.port import Slurm, SlurmError
from opsd.slurm.requeue import Without


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The Slurm job that this launcher is part of, if it is; ``log`` is a file in the run's folder."""

    environ: Mapping[str, str]
    log: Path
    connect: Callable[[], Slurm] = lambda: choose().slurm

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
        """Put the job back into the queue without what it has lost; end it if its batch script has died.

        Otherwise the batch script sees to the end. Guests that are gone are no loss of the job.
        """
        if not lost or not in_job(self.environ) or self._batch_script_lives(lost):
            return
        try:
            job = allocation(self.environ)
            lost = tuple(name for name in lost if name in job.nodes)
            if not lost:
                return
            slurm = self.connect()
            if code == exitcodes.REQUEUE:
                dismiss(slurm, self.log.parent, job, print_message)
                requeue_from_inside(slurm, job, Without(lost, unfit), log=str(self.log), say=print_message)
            elif any(found.batch_host in lost for found in slurm.jobs([job.job])):
                print_message(
                    f"the batch script of job {job.job} died with its node; cancelling the job, which is done"
                )
                dismiss(slurm, self.log.parent, job, print_message)
                slurm.cancel(job.job)
        except (SlurmError, AllocationError) as error:
            print_message(f"Slurm: {error}")

    def _batch_script_lives(self, lost: tuple[str, ...]) -> bool:
        """Whether there is an ``opsd slurm run`` that reads how the run has ended."""
        host = self.environ.get(BATCH_HOST)
        return host is not None and host not in lost
