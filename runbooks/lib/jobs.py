"""Pure helpers about Slurm's jobs on the GPUs of this node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from opsd.runbooks.base import Evidence, Finding, View

ON_GPU = "opsd_gpu_job_info"
JOB = "opsd_slurm_job_info"


def with_job(finding: Finding, view: View) -> Finding:
    """``finding`` about a GPU with the job that has it, if the runbook names none, and with whose that job is.

    Of several jobs on one GPU, as with MIG, none is named; they are in the evidence.
    """
    gpu = finding.culprit.gpu
    if gpu is None or finding.culprit.node not in (None, view.node):
        return finding
    jobs = sorted(
        {series.labels["job_id"] for series in view.select(ON_GPU, gpu=str(gpu)) if series.last is not None} - {""}
    )
    if not jobs or jobs == [finding.job]:
        return finding
    told = Evidence(f"GPU {gpu} belongs to {_named(jobs, view)}", "Slurm and the driver", view.wall)
    job = finding.job or (jobs[0] if len(jobs) == 1 else "")
    return replace(finding, job=job, evidence=(*finding.evidence, told))


def owner(job: str, view: View) -> str:
    """The user whose job it is, "" if Slurm does not tell."""
    return next((series.labels["user"] for series in view.select(JOB, job_id=job) if series.last is not None), "")


def is_halted(job: str, view: View) -> bool:
    """Whether Slurm has halted the job, so that it can do nothing."""
    found = (series.labels["state"] for series in view.select(JOB, job_id=job) if series.last is not None)
    return not {"suspended", "stopped"}.isdisjoint(found)


def _named(jobs: Sequence[str], view: View) -> str:
    whose = [f"{job} of {user}" if (user := owner(job, view)) else job for job in jobs]
    return f"job{'s' * (len(jobs) > 1)} {', '.join(whose)}"
