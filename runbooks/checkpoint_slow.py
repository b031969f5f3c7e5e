"""Checkpoints block the training longer than before, or become durable more slowly than they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cause, Cost, Culprit, Finding, Incident, Severity, View
from opsd.runbooks.lib.remedies import RunRunbook, notify_run
from opsd.runbooks.lib.runs import live_leaders, live_ranks, run_events, run_finding, run_recovered
from opsd.runbooks.lib.signals import counted, integer, number, text

PHASE = "checkpoint"
PAST_S = 600.0
FACTOR = 3.0
FLOOR_S, UNKNOWN_S = 20.0, 120.0
"""A checkpoint holds the training up for too long beyond three times the longest of the last ten minutes and this; the
second number is for a run that has not made any in that time."""

NOTICEABLE_S = 0.05
SLOWER_S, LEAST_STALLS = 2.0, 4
"""Checkpoints have become slower if the last two took three times as long as those before, and this much longer."""

HISTORY_S, LEAST_COMMITS = 86_400.0, 3
KEEPS_UP = 0.9
"""A save that takes this share of the time between two checkpoints is about to fall behind."""


def _stalls(view: View, rank: RankFact) -> list[float]:
    """Seconds for which each checkpoint of the last minutes has held the rank up, oldest first."""
    series = view.select("opsd_rank_phase_seconds_total", run=rank.run, rank=str(rank.rank), phase=PHASE)
    points = series[0].values(PAST_S) if series else ()
    return [after - before for (_, before), (_, after) in pairwise(points) if after - before > NOTICEABLE_S]


def _stuck(view: View, run: str) -> list[RankFact]:
    """The ranks that a checkpoint is blocking for too long now."""
    saving = [rank for rank in live_ranks(view, run) if rank.phase == PHASE]
    return [rank for rank in saving if view.now - rank.phase_since > _limit(view, rank)]


def _limit(view: View, rank: RankFact) -> float:
    past = _stalls(view, rank)
    return max(FLOOR_S, FACTOR * max(past)) if past else UNKNOWN_S


def _slower(stalls: Sequence[float]) -> tuple[float, float] | None:
    """(seconds now, seconds before) if the last two checkpoints were slower than those before them."""
    if len(stalls) < LEAST_STALLS:
        return None
    before, now = median(stalls[:-2]), min(stalls[-2:])
    return (now, before) if now >= FACTOR * before and now - before >= SLOWER_S else None


def _behind(view: View, leader: RankFact) -> tuple[float, float] | None:
    """(seconds until durable, seconds between two checkpoints) if saving hardly keeps up."""
    commits = run_events(view, "checkpoint_committed", leader.run, HISTORY_S)
    if len(commits) < LEAST_COMMITS:
        return None
    interval = median(after.at - before.at for before, after in pairwise(commits))
    newest = commits[-1]
    made = next((step.end for step in leader.steps if step.step == integer(newest.data, "step")), None)
    if made is None:
        return None
    ago = view.now - made
    lag = newest.at - view.wall + ago
    # More than the time since the step was done can only be a wall clock that has been stepped in between.
    return (lag, interval) if 0 < KEEPS_UP * interval < lag <= ago else None


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        if stuck := _stuck(view, leader.run):
            yield _standing(view, leader, stuck)
        elif slower := _slower(_stalls(view, leader)):
            now, before = slower
            said = f"each of the last two checkpoints held the training up for {now:.1f} s, {before:.1f} s before"
            yield _finding(view, leader, said, before=before)
        elif behind := _behind(view, leader):
            lag, interval = behind
            said = f"the last checkpoint was durable after {lag:.0f} s, there are {interval:.0f} s between two"
            yield _finding(view, leader, said)


def _standing(view: View, leader: RankFact, stuck: Sequence[RankFact]) -> Finding:
    """All ranks here save, or the others wait for the few that still do."""
    first = min(stuck, key=lambda rank: rank.phase_since)
    seconds = view.now - first.phase_since
    ranks = live_ranks(view, leader.run)
    few = 2 * len([rank for rank in ranks if rank.phase == PHASE]) < len(ranks)
    culprit = Culprit("storage", view.node, first.gpu if few else None, first.rank if few else None)
    who = f"rank {first.rank}" if few else f"{counted(len(stuck), 'rank')} here"
    said = f"{who} in a checkpoint for longer than {_limit(view, first):.0f} s"
    world = leader.world_size
    cost = Cost(1.0, seconds * world, f"{counted(world, 'GPU')} have waited for {seconds:.0f} s", world)
    return replace(_finding(view, leader, said), severity=Severity.CRITICAL, culprit=culprit, confidence=0.8, cost=cost)


def _finding(view: View, leader: RankFact, said: str, before: float | None = None) -> Finding:
    summary, culprit = f"checkpoints of {leader.run} are slow: {said}", Culprit("storage", view.node)
    return run_finding(view, leader, said, summary=summary, culprit=culprit, confidence=0.7, cost="", before=before)


def _healed(incident: Incident, view: View) -> bool | None:
    """True once no rank stands in a checkpoint and the last one was about as fast as before, or the run ended well."""
    run = text(incident.data, "run")
    leader = next((rank for rank in live_leaders(view) if rank.run == run), None)
    if leader is None:
        return run_recovered(incident, view) or None
    if any(rank.phase == PHASE for rank in live_ranks(view, run)):
        return False
    stalls, before = _stalls(view, leader), number(incident.data, "before")
    if before is not None and (not stalls or stalls[-1] >= 2 * before + NOTICEABLE_S):
        return False if stalls else None
    return _slower(stalls) is None and _behind(view, leader) is None


RUNBOOK = RunRunbook(
    first=("iostat -x 1 5",),
    detect=_detect,
    remedy=notify_run("; look at what checkpoints are written to"),
    healed=_healed,
    verify_s=1800.0,
    causes=(Cause("storage_slow", "node", lag_s=60.0),),
)
