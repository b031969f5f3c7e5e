"""The kernel has killed a process because memory ran out, of the node or of a control group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opsd.collectors.base import Event
from opsd.runbooks.base import Cause, Cost, Culprit, Evidence, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import job_of
from opsd.runbooks.lib.signals import grouped, integer, number, text

REMEMBERED_S = 600.0


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose process it was: a rank (``rank`` is None for anything else), and the job of its control group or run."""

    job: str
    run: str = ""
    rank: int | None = None


def _owner(view: View, event: Event) -> _Owner:
    """By what the kernel says of process and control group, by rank pages, and by the launcher if the rank is gone."""
    pid, job = integer(event.data, "pid"), text(event.data, "job")
    for rank in (*view.ranks, *view.ranks_then(event.at)):
        if pid == rank.pid or any(pid == helper for helper, _ in rank.workers):
            return _Owner(job or rank.job, rank.run, rank.rank)
    for gone in view.events("rank_exited", REMEMBERED_S):
        if integer(gone.data, "pid") == pid:
            run = text(gone.data, "run")
            return _Owner(job or job_of(view, run), run, integer(gone.data, "rank"))
    return _Owner(job)


def _detect(view: View) -> Iterator[Finding]:
    owned = ((event, _owner(view, event)) for event in view.events("oom_kill", REMEMBERED_S))
    by_job = grouped(owned, lambda pair: pair[1].job)
    return (_finding(view, job, killed) for job, killed in by_job.items())


def _finding(view: View, job: str, killed: Sequence[tuple[Event, _Owner]]) -> Finding:
    event, owner = next(((e, o) for e, o in reversed(killed) if o.rank is not None), killed[-1])
    size, user = number(event.data, "anon_rss_kib"), text(event.data, "uid")
    limit = text(event.data, "scope") == "Memory cgroup out of memory"
    whose = f"of job {job}" if job else f"of user {user}" if user else "of no job"
    facts = [
        f"{len(killed)} processes were killed" if len(killed) > 1 else "",
        f"it held {size / 2**20:.1f} GiB of memory" if size is not None else "",
        f"its control group was at its limit: {text(event.data, 'cgroup') or 'not named'}" if limit else "",
        f"rank {owner.rank} of run {owner.run} was hit" if owner.rank is not None else "",
    ]
    hit, detail = owner.rank is not None, "limit of the job's memory" if limit else "memory of the node"
    return Finding(
        key=f"{view.node}/{job}",
        severity=Severity.CRITICAL if hit or any(fact.job == job for fact in view.ranks if job) else Severity.WARNING,
        summary=f"out of memory on {view.node}: the kernel killed {text(event.data, 'process')} "
        f"(pid {integer(event.data, 'pid')}) {whose}",
        culprit=Culprit("rank" if hit else "node", view.node, rank=owner.rank, detail=detail),
        confidence=0.95,
        evidence=(
            *(Evidence(one.message, "kernel log", one.at) for one, _ in killed[-3:]),
            *(Evidence(fact, "kernel log", event.at) for fact in facts if fact),
        ),
        cost=Cost(text="the run restarts from its last checkpoint" if hit else ""),
        job=job,
        struck_at=killed[-1][0].at,
        data={"at": killed[-1][0].at, **({"run": owner.run, "rank": owner.rank} if hit else {})},
    )


def _healed(incident: Incident, view: View) -> bool | None:
    """True after ten minutes without another kill."""
    last = number(incident.data, "at") or incident.opened_at
    return True if view.known("kmsg") and view.wall - last >= REMEMBERED_S else None


def _of_the_node(symptom: Incident, _cause: Incident) -> bool:
    """Whether the memory of the node had run out, and not only what a job may use."""
    return symptom.culprit.detail == "memory of the node"


RUNBOOK = Runbook(
    first=("sacct -j JOB --format=JobID,State,ExitCode,MaxRSS,ReqMem", "journalctl -k --since -1hour"),
    detect=_detect,
    remedy=notify_node(": give the job more memory, or have it use less"),
    healed=_healed,
    causes=(Cause("host_memory", "node", lag_s=60.0, fits=_of_the_node),),
    needs=("kmsg",),
    verify_s=3600.0,
    hold_s=0.0,
)
