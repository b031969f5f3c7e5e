"""Checkpoints of a run are no longer evaluated although they used to be, so that a bad model would go unnoticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import gpu_hours, live_leaders, run_events, run_finding, run_over
from opsd.runbooks.lib.signals import integer, text

HISTORY_S = 7 * 86_400.0
LEAST_EVALUATIONS = 2
"""One evaluation may have been asked for by hand; a run that has had two is evaluated as it goes."""

NEWEST = 32
"""Evaluations by which it is judged what is usual."""

FACTOR, LEAST_BACKLOG = 2.0, 3
"""An evaluation is missing if more checkpoints wait for one than this, and than twice as many as usually do."""


@dataclass(frozen=True, slots=True)
class _Backlog:
    """Checkpoints that wait for an evaluation. ``usual`` is how many did when an evaluation came in."""

    evaluated: int
    waiting: int
    usual: float
    failed: int

    @property
    def late(self) -> bool:
        """True if more wait than usual."""
        return self.waiting > max(LEAST_BACKLOG, FACTOR * self.usual)


def _has_results(event: Event) -> bool:
    results = event.data.get("results")
    return isinstance(results, Mapping) and bool(results)


def _waiting(commits: Sequence[Event], evaluated: int, until: float) -> int:
    """How many checkpoints later than the one of step ``evaluated`` existed at the second ``until``."""
    steps = {integer(event.data, "step") for event in commits if event.at <= until}
    return sum(step > evaluated for step in steps)


def _backlog(view: View, run: str) -> _Backlog | None:
    """What waits for an evaluation, None for a run that is not evaluated."""
    commits = run_events(view, "checkpoint_committed", run, HISTORY_S)
    told = run_events(view, "evaluation", run, HISTORY_S)
    evaluations = [event for event in told if _has_results(event)]
    if len({integer(event.data, "step") for event in evaluations}) < LEAST_EVALUATIONS:
        return None
    earlier, evaluations = evaluations[:-NEWEST], evaluations[-NEWEST:]
    evaluated, usual = max((integer(event.data, "step") for event in earlier), default=-1), list[int]()
    for event in evaluations:
        if integer(event.data, "step") > evaluated:
            usual.append(_waiting(commits, evaluated, event.at))
            evaluated = integer(event.data, "step")
    failed = sum(integer(event.data, "step") > evaluated for event in told if not _has_results(event))
    return _Backlog(evaluated, _waiting(commits, evaluated, view.wall), median(usual), failed)


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        if (backlog := _backlog(view, leader.run)) is not None and backlog.late:
            yield _finding(view, leader, backlog)


def _finding(view: View, leader: RankFact, backlog: _Backlog) -> Finding:
    hours = gpu_hours(leader, backlog.evaluated)
    culprit = Culprit("unknown", detail="whatever starts or runs the evaluations")
    if backlog.failed:
        culprit = Culprit("user code", detail="evaluations run and have no results")
    return run_finding(
        view, leader,
        f"{backlog.waiting} checkpoints wait for an evaluation, usual are {backlog.usual:.0f}",
        f"the newest results are those of step {backlog.evaluated}, step {leader.steps[-1].step} is done",
        f"{backlog.failed} evaluations since then had no results" if backlog.failed else "",
        source="events of the run",
        summary=f"{leader.run} has {backlog.waiting} checkpoints without an evaluation",
        culprit=culprit,
        confidence=0.8 if backlog.failed else 0.4,
        cost=f"{hours:.1f} GPU-hours of training that nobody has judged",
        evaluated=backlog.evaluated,
    )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True once a later checkpoint has results, or the run has ended as planned."""
    run = text(incident.data, "run")
    backlog = _backlog(view, run)
    if backlog is not None and backlog.evaluated > integer(incident.data, "evaluated"):
        return True
    return run_over(incident, view)


RUNBOOK = RunRunbook(first=("opsd checkpoint list FOLDER",), detect=_detect, healed=_healed, verify_s=3600.0)
