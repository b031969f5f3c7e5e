"""A run that used to save checkpoints has done many more steps than usual without a new one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cause, Culprit, Finding, Incident, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import gpu_hours, live_leaders, ranks_of, run_events, run_finding, run_over
from opsd.runbooks.lib.signals import integer, text

HISTORY_S = 7 * 86_400.0
LEAST_COMMITS = 3
FACTOR = 2.5
"""A checkpoint is overdue after this many of its usual intervals, counted in steps: pauses delay steps and checkpoints
alike. One interval may be missed because a save took long."""


def _usual_steps(view: View, run: str) -> float | None:
    """Steps between two checkpoints, None before there were enough of them to tell."""
    steps = sorted({integer(event.data, "step") for event in run_events(view, "checkpoint_committed", run, HISTORY_S)})
    if len(steps) < LEAST_COMMITS:
        return None
    return median(after - before for before, after in pairwise(steps))


def _committed(view: View, run: str) -> int | None:
    """Step of the newest durable checkpoint: of what the ranks say now and what was reported before."""
    known = [rank.committed_step for rank in ranks_of(view, run) if rank.committed_step is not None]
    known += [integer(event.data, "step") for event in run_events(view, "checkpoint_committed", run, HISTORY_S)]
    return max(known, default=None)


def _overdue(view: View, leader: RankFact) -> tuple[int, float] | None:
    """(step of the newest checkpoint, usual interval in steps) if the next one is overdue."""
    usual, committed = _usual_steps(view, leader.run), _committed(view, leader.run)
    if usual is None or committed is None or leader.steps[-1].step - committed <= FACTOR * usual:
        return None
    return committed, usual


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        if (overdue := _overdue(view, leader)) is None:
            continue
        (committed, usual), done = overdue, leader.steps[-1].step
        behind, times = done - committed, f"{(done - committed) / usual:.1f}"
        yield run_finding(
            view, leader,
            f"step {done} is done, the newest checkpoint is of step {committed}, "
            f"usual are {usual:.0f} steps between two",
            summary=f"{leader.run} has done {behind} steps since its last checkpoint, {times} times the usual",
            culprit=Culprit("storage", view.node, detail="or the process that writes checkpoints"),
            confidence=0.5,
            cost=f"{gpu_hours(leader, committed):.1f} GPU-hours would be lost by a failure now",
            committed=committed,
        )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True once a newer checkpoint is durable, or the run has ended as planned."""
    run = text(incident.data, "run")
    committed = _committed(view, run)
    if committed is not None and committed > integer(incident.data, "committed"):
        return True
    return run_over(incident, view)


RUNBOOK = RunRunbook(
    first=("df -h FOLDER",),
    detect=_detect,
    healed=_healed,
    verify_s=1800.0,
    causes=(Cause("nvme_failing", "node", lag_s=60.0), Cause("storage_full", "node", lag_s=60.0)),
)
