"""What a launcher does with its Slurm job at the end of the run, if no batch script does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opsd import exitcodes
from opsd.launch.io.reporting import print_message
from opsd.launch.io.run_log import BATCH_HOST
from opsd.slurm.allocation import AllocationError, allocation, in_job
from opsd.slurm.connect import choose
from opsd.slurm.port import Slurm, SlurmError
from opsd.slurm.requeue import ExcludedNodes
from opsd.slurm.requeue_helper import requeue_from_inside
from opsd.slurm.spare_jobs import cancel_spares


@dataclass(frozen=True, slots=True)
class EnclosingJob:
    """The Slurm job that this launcher belongs to, if any; ``log`` is a file in the run's folder."""

    environ: Mapping[str, str]
    log: Path
    connect: Callable[[], Slurm] = lambda: choose().slurm

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
        """Requeue the job without the nodes it lost; cancel it if the run is over and its batch script is dead.

        While the batch script lives, it handles the end. A borrowed node that is gone is no loss of this job.
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
                cancel_spares(slurm, self.log.parent, job, print_message)
                requeue_from_inside(slurm, job, ExcludedNodes(lost, unfit), log=str(self.log), say=print_message)
            elif any(found.batch_host in lost for found in slurm.jobs([job.job])):
                print_message(
                    f"the batch script of job {job.job} died with its node; cancelling the job, which is done"
                )
                cancel_spares(slurm, self.log.parent, job, print_message)
                slurm.cancel(job.job)
        except (SlurmError, AllocationError) as error:
            print_message(f"Slurm: {error}")

    def _batch_script_lives(self, lost: tuple[str, ...]) -> bool:
        """Whether an ``opsd slurm run`` is alive that reads the outcome of the run."""
        host = self.environ.get(BATCH_HOST)
        return host is not None and host not in lost
