"""The loss of a run rises slowly and steadily, without a jump: it diverges, most often because of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import healed_by, live_leaders, live_ranks, run_finding
from opsd.runbooks.lib.signals import Trend, by_step, condensed, counted, due, number, thirds, trend

LOSS, NORM = "opsd_rank_loss", "opsd_rank_grad_norm"
LOOK_EVERY_S = 10.0
BLOCKS, LEAST_POINTS = 24, 120
SETTLED_STEPS = 100
"""Warm-up of the learning rate makes the loss go up and down; it says nothing yet."""

RISE = 0.02
"""A rise counts from this share of the loss on, within the window."""

STEADY = 5.0
"""Each half of the window has at least this fraction, one in five, of the rise: a jump or a new data stage has not."""

OVER = 0.5
"""The share of the rise that may be left when it counts as over."""


@dataclass(frozen=True, slots=True)
class _Rise:
    """Losses at the beginning and now, over ``steps`` steps; ``norms`` are gradient norms then and now."""

    before: float
    now: float
    steps: int
    line: Trend
    norms: tuple[float, float] | None


def _rise(view: View, leader: RankFact) -> _Rise | None:
    """How the loss has risen, None if it has not or too little is known."""
    points = by_step(view, LOSS, leader.run, leader.rank)
    if len(points) < LEAST_POINTS or leader.steps_reported < SETTLED_STEPS:
        return None
    course = condensed(points, BLOCKS)
    line, half = trend(course), len(course) // 2
    losses = [loss for _, loss in course]
    before, _, now = thirds(losses)
    halves = (trend(course[:half]), trend(course[-half:]))
    steady = min(part.rise for part in halves) >= line.rise / STEADY
    if line.rise < RISE * abs(before) or not line.sure or not steady:
        return None
    if min(now, losses[-1]) < before + OVER * (now - before):
        return None
    return _Rise(before, now, int(course[-1][0] - course[0][0]), line, _norms(view, leader))


def _norms(view: View, leader: RankFact) -> tuple[float, float] | None:
    norms = [norm for _, norm in by_step(view, NORM, leader.run, leader.rank)]
    if len(norms) < LEAST_POINTS:
        return None
    before, _, now = thirds(norms)
    return before, now


def _detect(view: View) -> Iterator[Finding]:
    series = view.select(LOSS)
    if not series or not due(series[0], LOOK_EVERY_S):
        return
    for leader in live_leaders(view):
        if (rise := _rise(view, leader)) is not None:
            yield run_finding(
                view, leader,
                f"the loss went from {rise.before:.4g} to {rise.now:.4g} in {rise.steps} steps, "
                f"{rise.line.slope * 1000:+.3g} in a thousand, scatter {rise.line.noise:.2g}",
                f"gradient norm {rise.norms[0]:.3g} at first, {rise.norms[1]:.3g} now" if rise.norms else "",
                summary=f"the loss of {leader.run} rises steadily, from {rise.before:.3g} to {rise.now:.3g}",
                culprit=Culprit("user code", detail="most likely the learning rate"),
                confidence=0.5,
                cost=f"if it goes on, {counted(rise.steps, 'step')} and more on {leader.world_size} GPUs",
                limit=rise.before + OVER * (rise.now - rise.before),
            )  # fmt: skip


@healed_by
def fell_below_limit(incident: Incident, view: View, leader: RankFact) -> bool:
    """True once the loss is below the incident's limit."""
    limit, losses = number(incident.data, "limit"), [step.loss for step in leader.steps]
    known = limit is not None and bool(losses) and bool(live_ranks(view, leader.run))
    return known and median(losses) < (limit or 0.0)


RUNBOOK = RunRunbook(
    first=("opsd report RUN_FOLDER --text",),
    detect=_detect,
    healed=fell_below_limit,
    clear_after_s=30.0,
    verify_s=3600.0,
)
