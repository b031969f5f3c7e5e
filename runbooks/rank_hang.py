"""The job makes no progress although every process exists: which rank the others wait for, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from opsd.attribution import INCONCLUSIVE, STOPPED, RankState, attribute_hang
from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Cause, Cost, Culprit, Detect, Evidence, Finding, Incident, Severity, View
from opsd.runbooks.lib.remedies import RunRunbook, notify_unsupervised
from opsd.runbooks.lib.runs import (
    downtime,
    job_of,
    last_step,
    quoted,
    rank_of,
    rank_then,
    ranks_of,
    run_recovered,
    supervised,
    unsolved,
)
from opsd.runbooks.lib.signals import counted, integer, number, text

FACTOR = 5.0
"""A rank hangs after this many times the longest of its recent steps (the factor of NVIDIA's resiliency extension)."""

FLOOR_S = 15.0
SLOW_PHASES = ("setup", "other", "checkpoint", "evaluation")
SLOW_PHASE_LIMIT_S = 900.0
"""Phases without a past to learn from: reading a checkpoint over a slow network once took hours and then recovered."""

SETTLED_STEPS = 3
"""The first steps compile and autotune; a rank that has not completed this many has the limit of a slow phase."""


def waits_for_data(states: Sequence[RankState], culprit: int) -> bool:
    """True if the culprit is in good health and waits for its data: that is a ``dataloader_stall``."""
    return any(s.rank == culprit and s.phase == "data" and s.process not in STOPPED for s in states)


def waits_for_others(states: Sequence[RankState]) -> bool:
    """True if all ranks here wait in a collective and none of them holds it up: that is a ``collective_hang``."""
    waiting = bool(states) and all(state.phase == "collective" for state in states)
    return waiting and attribute_hang(states).confidence <= INCONCLUSIVE


def reported_states(event: Event) -> list[RankState]:
    """The ranks as the launcher saw them when it detected the hang."""
    listed = event.data.get("ranks")
    return [
        RankState(
            rank=integer(rank, "rank"),
            phase=text(rank, "phase"),
            stuck_s=number(rank, "stuck_s") or 0.0,
            process=text(rank, "process") or None,
            step=integer(rank, "step"),
        )
        for rank in (listed if isinstance(listed, list | tuple) else ())
        if isinstance(rank, Mapping)
    ]


def _from_launcher(event: Event, view: View) -> Finding | None:
    data = event.data
    run, rank, generation = text(data, "run"), number(data, "rank"), integer(data, "generation")
    states = reported_states(event)
    if waits_for_others(states) if rank is None else waits_for_data(states, int(rank)):
        return None
    stuck, reason, stacks = number(data, "stuck_s") or 0.0, text(data, "reason"), text(data, "stacks")
    sentences = data.get("evidence")
    limit = f"its limit in {text(data, 'phase')} is {text(data, 'limit_s')} s"
    return Finding(
        key=f"{run}/generation {generation}",
        severity=Severity.CRITICAL,
        summary=f"{run} hangs in {text(data, 'phase')}: {reason}",
        culprit=_named(view, event, None if rank is None else int(rank), reason),
        confidence=_confidence(states, rank, data.get("flight_recorder")),
        evidence=(
            *quoted(event, "launcher", f"no rank has moved for {stuck:.1f} s; {limit}"),
            *quoted(event, "rank pages", *map(str, sentences if isinstance(sentences, list | tuple) else ())),
            *quoted(event, "launcher", f"stacks of all ranks: {stacks}" if stacks else ""),
        ),
        cost=downtime(view, event, event.at - stuck),
        job=job_of(view, run),
        data={"run": run, "rank": rank, "generation": generation, "step": integer(data, "step")},
    )


def _named(view: View, hang: Event, rank: int | None, reason: str) -> Culprit:
    """The launcher's culprit, who is unknown if no rank stood out."""
    if rank is None:
        return Culprit("unknown", view.node, detail=reason)
    page = rank_then(view, text(hang.data, "run"), rank, hang.at)
    return Culprit("rank", view.node, page.gpu if page else None, rank, reason.removeprefix(f"rank {rank}: "))


def _confidence(states: Sequence[RankState], rank: float | None, recorder: object) -> float:
    """How sure the launcher's verdict is; it had stacks and flight recorders as well when it disagrees with pages."""
    if rank is None:
        return 0.2
    recorded = recorder.get("culprits") if isinstance(recorder, Mapping) else None
    if isinstance(recorder, Mapping) and isinstance(recorded, list | tuple) and rank in recorded:
        return min(0.95, max(0.7, number(recorder, "confidence") or 0.0))
    verdict = attribute_hang(states) if states else None
    return max(verdict.confidence, 0.7) if verdict and verdict.rank == rank else 0.7


def state_of(rank: RankFact, now: float) -> RankState:
    """A rank page as the search for the culprit wants it."""
    return RankState(rank.rank, rank.phase, now - rank.changed, rank.process, last_step(rank))


def limit_of(rank: RankFact) -> float:
    """Seconds without progress that are normal for the rank in its phase, by its own past."""
    if rank.phase in SLOW_PHASES or len(rank.steps) < SETTLED_STEPS:
        return SLOW_PHASE_LIMIT_S
    return max(FLOOR_S, FACTOR * max(step.duration_s for step in rank.steps))


def _from_pages(view: View, run: str) -> Finding | None:
    """The hang of a run without a launcher: no rank makes progress, and the culprit's stop is unusually long."""
    ranks = [rank for rank in ranks_of(view, run) if rank.live]
    states = [state_of(rank, view.now) for rank in ranks]
    if not states or min(state.stuck_s for state in states) < FLOOR_S:
        return None
    verdict = attribute_hang(states)
    culprit = next(rank for rank in ranks if rank.rank == verdict.rank)
    stuck, limit = view.now - culprit.changed, limit_of(culprit)
    if stuck < limit or waits_for_data(states, culprit.rank) or waits_for_others(states):
        return None
    world = culprit.world_size
    return Finding(
        key=f"{run}/generation {culprit.generation}",
        severity=Severity.CRITICAL,
        summary=f"rank {culprit.rank} of {run} hangs in {culprit.phase}: {verdict.reason}",
        culprit=Culprit("rank", view.node, culprit.gpu, culprit.rank, verdict.reason),
        confidence=verdict.confidence,
        evidence=(
            Evidence(f"no rank has moved; rank {culprit.rank} may take {limit:.0f} s", "rank pages", view.wall),
            *(Evidence(sentence, "rank pages", view.wall) for sentence in verdict.evidence),
        ),
        cost=Cost(1.0, stuck * world, f"{counted(world, 'GPU')} stood still for {stuck:.0f} s"),
        job=culprit.job,
        data={"run": run, "rank": culprit.rank, "generation": culprit.generation, "step": last_step(culprit)},
    )


def hangs(
    from_launcher: Callable[[Event, View], Finding | None], from_pages: Callable[[View, str], Finding | None]
) -> Detect:
    """A detector of what ``from_launcher`` finds in reports of launchers, ``from_pages`` in runs that have none."""

    def detect(view: View) -> Iterator[Finding]:
        found = [from_launcher(event, view) for event in unsolved(view, "hang_detected")]
        if view.known("ranks"):
            found += [from_pages(view, run) for run in sorted({r.run for r in view.ranks}) if not supervised(view, run)]
        return (finding for finding in found if finding is not None)

    return detect


def moved_on(incident: Incident, view: View) -> bool | None:
    """True once the incident's rank has completed a further step, or a later generation has, or the run ended well."""
    run, generation = text(incident.data, "run"), integer(incident.data, "generation")
    over = run_recovered(incident, view)
    rank = rank_of(view, run, integer(incident.data, "rank"))
    if over is False and rank is not None and rank.generation == generation and rank.live:
        return last_step(rank) > integer(incident.data, "step")
    return over


RUNBOOK = RunRunbook(
    first=("opsd diagnose --job JOB", "opsd diagnose"),
    detect=hangs(_from_launcher, _from_pages),
    remedy=notify_unsupervised,
    healed=moved_on,
    verify_s=180.0,
    causes=(
        Cause("gpu_lost", "gpu", within_s=60.0),
        Cause("gpu_xid", "gpu", within_s=60.0),
        Cause("dataloader_stall", "rank"),
        Cause("ib_link", "node"),
    ),
)
