"""The loss of a run has jumped far above its own past, and is on its way back or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import healed_by, live_leaders, run_finding
from opsd.runbooks.lib.signals import level, number

PAST_S, BUT_LAST_S = 600.0, 20.0
LEAST_SAMPLES = 60
SETTLED_STEPS = 30
"""In its first steps the loss falls so fast that it has no level to jump from."""

RECENT, MOST = 5, 3
"""A spike is seen in this many of the last steps; one odd batch is not one."""

OUTLIER, LEAST_RISE = 8.0, 0.1
"""Above the past level by this many robust standard deviations, and by this share of it."""

FALLING = 0.3
RECOVERED = 0.25
"""The share of the jump that may be left when the spike counts as over."""


def past_level(view: View, leader: RankFact, metric: str) -> tuple[float, float] | None:
    """Level and spread of the rank's ``metric`` before now, None if too little is known."""
    series = view.select(metric, run=leader.run, rank=str(leader.rank))
    past = level(series[0], PAST_S, BUT_LAST_S) if series else None
    return None if past is None or past[2] < LEAST_SAMPLES or leader.steps_reported < SETTLED_STEPS else past[:2]


def began_anew(view: View, leader: RankFact) -> bool:
    """True if the run went back to its first steps within the time of the past level, as with a run id used again."""
    for series in view.select("opsd_rank_step", run=leader.run, rank=str(leader.rank)):
        steps = [step for _, step in series.values(PAST_S)]
        return any(after < before and after < SETTLED_STEPS for before, after in pairwise(steps))
    return False


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        losses = [step.loss for step in leader.steps[-RECENT:]]
        if not all(map(math.isfinite, losses)) or (past := past_level(view, leader, "opsd_rank_loss")) is None:
            continue
        middle, noise = past
        limit = middle + max(OUTLIER * noise, LEAST_RISE * abs(middle))
        if sum(loss > limit for loss in losses) >= MOST and not began_anew(view, leader):
            yield _finding(view, leader, losses, middle, limit)


def _first_step(view: View, leader: RankFact, limit: float) -> int:
    """The step with which the loss went above ``limit`` this time, as far back as the window reaches."""
    labels = {"run": leader.run, "rank": str(leader.rank)}
    below = [
        at for series in view.select("opsd_rank_loss", **labels) for at, loss in series.values(PAST_S) if loss <= limit
    ]
    since = max(below, default=0.0)
    later = (n for series in view.select("opsd_rank_step", **labels) for at, n in series.values(PAST_S) if at > since)
    return int(next(later, leader.steps[-1].step))


def _finding(view: View, leader: RankFact, losses: Sequence[float], before: float, limit: float) -> Finding:
    top, first = max(losses), _first_step(view, leader, limit)
    course = "falling again" if losses[-1] < top - FALLING * (top - before) else "not falling"
    return run_finding(
        view, leader,
        f"the last losses are {', '.join(f'{loss:.4g}' for loss in losses)}",
        f"the first high one was that of step {first}",
        f"the median of the last ten minutes is {before:.4g}",
        f"gradient norm {leader.steps[-1].grad_norm:.4g}",
        summary=f"the loss of {leader.run} has jumped from {before:.3g} to {top:.3g} and is {course}",
        culprit=Culprit("data", view.node, detail=f"most likely the batches around step {first}"),
        confidence=0.5,
        cost="if it does not fall by itself, the steps since the last checkpoint before it",
        before=before,
        top=top,
    )  # fmt: skip


@healed_by
def _healed(incident: Incident, _view: View, leader: RankFact) -> bool:
    """True once most of the jump is gone."""
    before, top = number(incident.data, "before"), number(incident.data, "top")
    if before is None or top is None:
        return False
    losses = [step.loss for step in leader.steps[-RECENT:]]
    return len(losses) == RECENT and all(loss < before + RECOVERED * (top - before) for loss in losses)


RUNBOOK = RunRunbook(
    first=("opsd report RUN_FOLDER --text",),
    detect=_detect,
    healed=_healed,
    clear_after_s=10.0,
    verify_s=1800.0,
    hold_s=0.0,
)
