"""GPUs that a Slurm job has and does not use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opsd.runbooks.base import Action, Cost, Culprit, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import is_halted, owner
from opsd.runbooks.lib.signals import said

IDLE = "opsd_gpu_job_idle_seconds"

IDLE_S = 1800.0
"""Longer than loading, compiling, an evaluation on processors, or a person's pause in a notebook usually takes."""


def _idle(view: View) -> Mapping[str, set[int]]:
    """By job the GPUs that have been idle for long; none of jobs that Slurm has suspended."""
    found: dict[str, set[int]] = {}
    for series in view.select(IDLE):
        if series.last is not None and series.last >= IDLE_S:
            found.setdefault(series.labels["job_id"], set()).add(int(series.labels["gpu"]))
    return {job: gpus for job, gpus in found.items() if not is_halted(job, view)}


def _detect(view: View) -> Iterator[Finding]:
    for job, gpus in _idle(view).items():
        user, listed = owner(job, view), ", ".join(map(str, sorted(gpus)))
        whose = f"job {job}{f' of {user}' if user else ''}"
        facts = (f"no kernel has run on GPU {gpu} for more than {IDLE_S / 60:.0f} minutes" for gpu in sorted(gpus))
        yield Finding(
            key=job,
            severity=Severity.INFO,
            summary=f"{whose} does not use GPU{'s' * (len(gpus) > 1)} {listed} of {view.node}",
            culprit=Culprit("user code", view.node, detail=whose),
            confidence=0.9,
            evidence=said(view, "Slurm and the driver", *facts),
            cost=Cost(throughput_ratio=1.0, gpus=len(gpus), text="nobody else can use them meanwhile"),
            job=job,
        )


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    """A word to the owner, where only the owner looks, and one to the operators."""
    text = f"{incident.summary} for {IDLE_S / 60:.0f} minutes and more; release what is not needed"
    told = (Action("comment_job", incident.job, {"job": int(incident.job)}, text),) if incident.job.isdecimal() else ()
    return (*told, *notify_node()(incident, view))


def _healed(incident: Incident, view: View) -> bool:
    return incident.job not in _idle(view)


RUNBOOK = Runbook(
    first=("scontrol show job -d JOB",),
    detect=_detect,
    remedy=_remedy,
    healed=_healed,
    needs=("jobs",),
    open_after_s=30.0,
    clear_after_s=30.0,
    verify_s=86_400.0,
    look_every_s=10.0,
)
