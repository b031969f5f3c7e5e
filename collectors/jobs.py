"""The Slurm jobs on this node's GPUs, and how long their GPUs have been idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from opsd.collectors.base import Collector, Context, Metric, NoData, Plugin, Reading, Sample
from opsd.collectors.lib.gpu_owners import GpuJobs, GpuOwners
from opsd.collectors.lib.rank_series import JOB_INFO
from opsd.settings.sections import CollectorSettings

INTERVAL_S: Final = 5.0

IDLE = Metric(
    "opsd_gpu_job_idle_seconds",
    "Time for which a job has had a whole GPU on which no kernel ran.",
    unit="seconds",
    labels=("gpu", "job_id"),
)
ON_INSTANCE = Metric(
    "opsd_mig_job_info",
    "The job that Slurm gave a GPU instance of MIG, or whose processes are on it; their memory and number are in "
    "opsd_mig_*.",
    "info",
    labels=("gpu", "GPU_I_ID", "job_id"),
)
LABELS: Final = {
    "GPU_I_ID": "GPU instances of a GPU, 7 at most",
    "gpu": "GPUs of the node by index",
    "job_id": "Slurm jobs that have a GPU, mostly one for each GPU",
    "run": "empty",
    "rank": "empty",
}


class JobsSettings(CollectorSettings):
    """Slurm's jobs on the GPUs of this node, also those without rank pages."""


class JobsCollector:
    """The jobs that ``jobs`` finds. ``gpu_owners`` has what other collectors know of GPUs and jobs."""

    name = "jobs"
    metrics = (JOB_INFO, IDLE, ON_INSTANCE)
    interval_s = INTERVAL_S

    def __init__(
        self, gpu_owners: GpuOwners, jobs: GpuJobs | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gpu_owners, self._clock = gpu_owners, clock
        self._jobs = jobs or GpuJobs(gpu_owners, clock=clock)
        self._since: Mapping[tuple[int, str], float] = {}

    def collect(self) -> Reading | NoData:
        """Look whose GPUs they are now."""
        if not self._gpu_owners.holders and not self._gpu_owners.worked:
            return NoData("the driver has told of no GPU of this node")
        now = self._clock()
        found = [(gpu, job) for gpu, jobs in self._jobs.look().items() for job in sorted(jobs)]
        self._since = {pair: self._since.get(pair, now) for pair in found}
        return Reading(tuple(self._samples(now)))

    def _samples(self, now: float) -> Iterator[Sample]:
        for (gpu, job), since in self._since.items():
            if (gpu, job) not in self._gpu_owners.ranked:
                yield Sample(JOB_INFO, 1.0, (str(gpu), job, "", ""))
            worked = self._gpu_owners.worked.get(gpu)
            if worked is not None and gpu not in self._gpu_owners.shares.get(job, ()):
                yield Sample(IDLE, max(0.0, now - max(worked, since)), (str(gpu), job))
        for (gpu, instance), jobs in self._gpu_owners.jobs_on.items():
            for job in sorted(jobs):
                yield Sample(ON_INSTANCE, 1.0, (str(gpu), str(instance), job))


def _make(_settings: JobsSettings, context: Context) -> Collector:
    return JobsCollector(context.shared(GpuOwners))


COLLECTOR = Plugin("jobs", JobsSettings, _make, LABELS, witness=True)
