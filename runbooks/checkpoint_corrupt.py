"""A checkpoint failed its verification at load time: which file, and whether an older one was loaded instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opsd.collectors.base import Event
from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Severity, View
from opsd.runbooks.lib.remedies import RunRunbook, notify_run
from opsd.runbooks.lib.runs import FRESH_S, REMEMBERED_S, job_of, quoted, ranks_of, run_events, run_of, steps_lost
from opsd.runbooks.lib.signals import counted, grouped, integer, number, text


def _replaced(view: View, run: str, step: int, since: float) -> bool | None:
    """Whether ``run`` has a good checkpoint again: an older one was loaded, or a newer one committed."""
    if not view.known("ranks"):
        return None
    later = [e for kind in ("checkpoint_loaded", "checkpoint_committed") for e in run_events(view, kind, run)]
    if any(event.at >= since and integer(event.data, "step") != step for event in later):
        return True
    ranks, fact = ranks_of(view, run), run_of(view, run)
    if any(rank.committed_step is not None and rank.committed_step > step for rank in ranks):
        return True
    return False if ranks or fact is not None else None


def _cost(view: View, run: str, step: int, since: float) -> Cost:
    loaded = [e for e in run_events(view, "checkpoint_loaded", run) if e.at >= since]
    if not loaded:
        return Cost()
    lost = max(0, step - integer(loaded[-1].data, "step", step))
    return steps_lost(view, run, lost, f"{counted(lost, 'further step')} to do again on {{gpus}}")


def _finding(events: Sequence[Event], view: View) -> Finding:
    """One incident for one checkpoint, however many ranks found a damaged file in it."""
    first = events[0]
    run, step = text(first.data, "run"), integer(first.data, "step")
    files = sorted({text(event.data, "file") for event in events})
    return Finding(
        key=f"{run}/step {step}",
        severity=Severity.WARNING,
        summary=f"the checkpoint of step {step} of {run} is damaged: {', '.join(files)}",
        culprit=Culprit("storage", view.node, detail=", ".join(files)),
        confidence=0.9,
        evidence=tuple(
            evidence
            for event in events
            for evidence in quoted(event, f"rank {text(event.data, 'rank')}", text(event.data, "why") or event.message)
        ),
        cost=_cost(view, run, step, first.at),
        job=job_of(view, run),
        data={"run": run, "step": step, "rejected_at": first.at},
    )


def _detect(view: View) -> Iterator[Finding]:
    rejected = view.events("checkpoint_rejected", REMEMBERED_S)
    by_step = grouped(rejected, lambda event: (text(event.data, "run"), integer(event.data, "step")))
    for (run, step), events in by_step.items():
        fresh = view.wall - events[-1].at <= FRESH_S
        if fresh or _replaced(view, run, step, events[0].at) is False:
            yield _finding(events, view)


def _healed(incident: Incident, view: View) -> bool | None:
    data = incident.data
    return _replaced(view, text(data, "run"), integer(data, "step"), number(data, "rejected_at") or incident.opened_at)


RUNBOOK = RunRunbook(
    first=("opsd checkpoint verify FOLDER",),
    detect=_detect,
    remedy=notify_run("; the file stays where it is for the post-mortem"),
    healed=_healed,
    verify_s=300.0,
)
