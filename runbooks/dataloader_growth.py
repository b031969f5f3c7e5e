"""Waiting for data takes longer with every step, or again and again after the same number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, Severity, View
from opsd.runbooks.lib.losses import lost
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import leaders, live_ranks, rank_of, run_finding, run_recovered, step_seconds
from opsd.runbooks.lib.signals import Point, by_step, condensed, due, integer, number, spread, text, thirds, trend

WAIT, STEP = "opsd_rank_phase_seconds_total", "opsd_rank_step"
LEAST_S = 120.0
LOOK_EVERY_S = 10.0
SETTLED_STEPS = 30

BLOCKS, LEAST_BLOCKS = 24, 9
"""The window is cut into so many blocks of steps; the median of a block forgets single waits."""

GROWN = 0.03
"""Growth over the window counts from this share of a step on; each half of the window has to have its part in it."""

DROP_FACTOR, DROP_SHARE, LEAST_DROPS = 5.0, 0.2, 4
REGULAR = 0.15
"""A drop is a wait of five times the usual one and a fifth of a step; four with gaps this equal are periodic."""

WORTH, COSTLY = 0.05, 0.2
"""Shares of the throughput: what periodic drops have to cost to be told, and what makes either kind critical."""

FELL = 0.25
"""The share of the growth that may be left when it counts as over."""

PERIODS_OFF, PERIODS_OVER = 1.5, 2.5
"""Drops have stopped if none came for so many periods, and it is over after so many."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """How a rank waits. ``limit`` is the wait in seconds below which it would be over; ``period`` 0 if it grows."""

    rank: RankFact
    said: str
    share: float
    limit: float
    period: int = 0


def _waits(view: View, rank: RankFact) -> list[Point]:
    """(step, seconds waited for data per step) of the window, since the rank last went back to an earlier step."""
    spent = by_step(view, WAIT, rank.run, rank.rank, phase="data")
    return [(after, (high - low) / (after - before)) for (before, low), (after, high) in pairwise(spent)]


def _growing(rank: RankFact, waits: Sequence[Point], step_s: float) -> _Pattern | None:
    """The rank's pattern if it waits longer and longer."""
    blocks = condensed(waits, BLOCKS)
    if len(blocks) < LEAST_BLOCKS:
        return None
    line, (first, _, late) = trend(blocks), thirds([wait for _, wait in blocks])
    half = len(blocks) // 2
    steady = min(trend(blocks[:half]).rise, trend(blocks[-half:]).rise) >= line.rise / 5
    limit = first + FELL * (late - first)
    if line.rise < GROWN * step_s or not line.sure or not steady or blocks[-1][1] <= limit:
        return None
    said = (
        f"rank {rank.rank} waits {line.slope * 1000 * 1000:.2f} ms longer for data after every thousand steps: "
        f"{first:.3f} s a step at first, {late:.3f} s now, of {step_s:.2f} s"
    )
    return _Pattern(rank, said, (late - first) / step_s, limit)


def _periodic(rank: RankFact, waits: Sequence[Point], step_s: float) -> _Pattern | None:
    """The rank's pattern if long waits come again after the same number of steps."""
    usual = median(wait for _, wait in waits)
    limit = max(DROP_FACTOR * usual, DROP_SHARE * step_s)
    long = [(step, wait) for step, wait in waits if wait > limit]
    drops = [step for (before, _), (step, _) in pairwise([(-2.0, 0.0), *long]) if step - before > 2]
    gaps = [after - before for before, after in pairwise(drops)]
    if len(drops) < LEAST_DROPS or spread(gaps) > REGULAR * median(gaps):
        return None
    period, each = median(gaps), sum(wait - usual for _, wait in long) / len(drops)
    share = each / (each + period * step_s)
    if share < WORTH or waits[-1][0] - drops[-1] > PERIODS_OFF * period:
        return None
    said = f"rank {rank.rank} waits {each:.1f} s for data every {period:.0f} steps, {len(drops)} times in this window"
    return _Pattern(rank, said, share, limit, int(period))


def _pattern(view: View, rank: RankFact) -> _Pattern | None:
    waits, step_s = _waits(view, rank), step_seconds([rank])
    elapsed = sum(step.duration_s for step in rank.steps) / max(1, len(rank.steps)) * len(waits)
    if rank.steps_reported < SETTLED_STEPS or elapsed < LEAST_S or step_s <= 0:
        return None
    return _growing(rank, waits, step_s) or _periodic(rank, waits, step_s)


def _detect(view: View) -> Iterator[Finding]:
    steps = view.select(STEP)
    if not steps or not due(steps[0], LOOK_EVERY_S):
        return
    for leader in leaders(view):
        ranks = [rank for rank in live_ranks(view, leader.run) if rank.generation == leader.generation]
        found = [pattern for rank in ranks if (pattern := _pattern(view, rank)) is not None]
        if found:
            yield _finding(view, sorted(found, key=lambda pattern: -pattern.share), len(ranks))


def _finding(view: View, found: Sequence[_Pattern], ranks: int) -> Finding:
    worst = found[0]
    rank = worst.rank
    course = f"every {worst.period} steps" if worst.period else "longer with every step"
    culprit = Culprit("data", view.node, detail="every loader")
    if len(found) == 1 and ranks > 1:
        culprit = Culprit("data", view.node, rank.gpu, rank.rank, "its loader")
    return run_finding(
        view, rank, *(pattern.said for pattern in found[:4]),
        severity=Severity.CRITICAL if worst.share >= COSTLY else Severity.WARNING,
        summary=f"{rank.run} waits for data {course}",
        culprit=culprit,
        confidence=0.8,
        cost=lost(view, rank, worst.share),
        limit=worst.limit,
        period=worst.period,
    )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the rank waits as little as before, through two periods and a half, or the run has ended."""
    data = incident.data
    rank = rank_of(view, text(data, "run"), integer(data, "rank"))
    if rank is None or not rank.live or not rank.steps:
        return run_recovered(incident, view) or None
    period, waits = integer(data, "period", 0), _waits(view, rank)
    telling = rank.steps[-1].step - max(10, int(PERIODS_OVER * period))
    recent = [wait for step, wait in waits if step > telling]
    if not recent or len(waits) < 5:
        return False
    return (max(recent) if period else median(recent)) <= (number(data, "limit") or 0.0)


RUNBOOK = RunRunbook(first=("opsd diagnose",), detect=_detect, healed=_healed, clear_after_s=20.0, verify_s=3600.0)
