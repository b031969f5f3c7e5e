"""One rank waits for its next batch far longer than usual and every other rank waits for that rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from opsd.attribution import STOPPED, UNINTERRUPTIBLE
from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Action, Cause, Cost, Culprit, Finding, Incident, Severity, View
from opsd.runbooks.lib.remedies import RunRunbook, notice
from opsd.runbooks.lib.runs import (
    downtime,
    job_of,
    last_step,
    live_ranks,
    quoted,
    rank_of,
    rank_then,
    run_of,
    supervised,
    unsolved,
)
from opsd.runbooks.lib.signals import counted, integer, number, said, text
from opsd.runbooks.rank_hang import moved_on, reported_states, waits_for_data

FLOOR_S = 3.0
FACTOR = 10.0
"""A stall is a wait above the floor and above this many times the rank's own median wait."""

SETTLED_STEPS = 3
"""The first batches open files and fill buffers; they say nothing about the loader."""

_WORST_FIRST = (*STOPPED, UNINTERRUPTIBLE, "S", "R")


def _usual_wait(rank: RankFact) -> float:
    return median(step.phase_s.get("data", 0.0) for step in rank.steps)


def _limit(rank: RankFact) -> float:
    return max(FLOOR_S, FACTOR * _usual_wait(rank))


def _waits(rank: RankFact) -> bool:
    settled = rank.steps_reported >= SETTLED_STEPS and len(rank.steps) > 0
    return rank.live and rank.process not in STOPPED and rank.phase == "data" and settled


def _from_pages(view: View) -> Iterator[Finding]:
    waiting = [rank for rank in view.ranks if _waits(rank)]
    for run in sorted({rank.run for rank in waiting if view.now - rank.phase_since > _limit(rank)}):
        # Half the limit: ranks stopped by one cause reach their limits a moment apart.
        stalled = [r for r in waiting if r.run == run and view.now - r.phase_since > _limit(r) / 2]
        alive = live_ranks(view, run)
        if len(alive) > 1 and len(stalled) == len(alive):
            yield _shared(stalled, view)
        else:
            yield from (_finding(rank, view) for rank in stalled if view.now - rank.phase_since > _limit(rank))


def _finding(rank: RankFact, view: View) -> Finding:
    waited = view.now - rank.phase_since
    worker = stalled_worker(rank)
    halted = worker is not None and worker[1] in STOPPED
    others = sorted({r.phase for r in live_ranks(view, rank.run) if r.rank != rank.rank and r.phase != "data"})
    facts = [
        f"rank {rank.rank} has waited {waited:.1f} s for its batch; its usual wait is {_usual_wait(rank):.3f} s",
        f"its loader process {worker[0]} is in state {worker[1]}{_meaning(worker[1])}" if worker else "",
        f"the other ranks wait for it in {' and '.join(others)}" if others else "",
    ]
    return Finding(
        key=f"{rank.run}/generation {rank.generation}/rank {rank.rank}",
        severity=Severity.CRITICAL,
        summary=f"rank {rank.rank} of {rank.run} has waited {waited:.0f} s for data",
        culprit=Culprit("data", view.node, rank.gpu, rank.rank, "loader process stopped" if halted else "loader"),
        confidence=0.95 if halted else 0.85,
        evidence=said(view, "rank pages", *facts),
        cost=Cost(1.0, waited * rank.world_size, f"{counted(rank.world_size, 'GPU')} stood still for {waited:.0f} s"),
        job=rank.job,
        data={"run": rank.run, "rank": rank.rank, "generation": rank.generation, "step": last_step(rank)},
    )


def _shared(ranks: Sequence[RankFact], view: View) -> Finding:
    """Every rank of the node waits: not one loader's fault, but that of what all of them read from."""
    first = max(ranks, key=lambda rank: view.now - rank.phase_since)
    finding, waited = _finding(first, view), view.now - first.phase_since
    return replace(
        finding,
        key=f"{first.run}/generation {first.generation}/all ranks",
        summary=f"all {len(ranks)} ranks of {first.run} on this node have waited {waited:.0f} s for data",
        culprit=Culprit("data", view.node, detail="every rank: the storage or the dataset they share"),
        confidence=0.8,
        data={**finding.data, "shared": True},
    )


def stalled_worker(rank: RankFact) -> tuple[int, str] | None:
    """(pid, state letter) of the rank's loader process, the one least able to run if there are several."""
    states = rank.worker_process or (None,) * len(rank.workers)
    loaders = [(pid, state or "?") for (pid, role), state in zip(rank.workers, states, strict=False) if role == "data"]
    return min(loaders, key=lambda loader: _badness(loader[1]), default=None)


def _badness(state: str) -> int:
    return _WORST_FIRST.index(state) if state in _WORST_FIRST else len(_WORST_FIRST)


def _meaning(state: str) -> str:
    if state == UNINTERRUPTIBLE:
        return " (waiting for a disk or file server)"
    return f" ({STOPPED[state]})" if state in STOPPED else ""


def _from_launcher(event: Event, view: View) -> Finding | None:
    """The launcher called a hang what is a wait for data: its limit was reached before ours."""
    data = event.data
    run, rank, generation = text(data, "run"), integer(data, "rank"), integer(data, "generation")
    if not waits_for_data(reported_states(event), rank):
        return None
    stuck = number(data, "stuck_s") or 0.0
    page = rank_then(view, run, rank, event.at)
    said = f"rank {rank} has waited {stuck:.1f} s for its batch; the launcher's limit is {text(data, 'limit_s')} s"
    return Finding(
        key=f"{run}/generation {generation}/rank {rank}",
        severity=Severity.CRITICAL,
        summary=f"rank {rank} of {run} has waited {stuck:.0f} s for data",
        culprit=Culprit("data", view.node, page.gpu if page else None, rank, "loader"),
        confidence=0.85,
        evidence=quoted(event, "launcher", said),
        cost=downtime(view, event, event.at - stuck),
        job=job_of(view, run),
        data={"run": run, "rank": rank, "generation": generation, "step": integer(data, "step")},
    )


def _detect(view: View) -> Iterator[Finding]:
    found = {finding.key: finding for finding in _from_pages(view)} if view.known("ranks") else {}
    yield from found.values()
    for event in unsolved(view, "hang_detected"):
        if (finding := _from_launcher(event, view)) is not None and finding.key not in found:
            yield finding


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    data, why = incident.data, incident.summary
    run, index = text(data, "run"), integer(data, "rank")
    rank, supervisor = rank_of(view, run, index), run_of(view, run)
    if rank is None or not rank.live or rank.generation != integer(data, "generation"):
        return ()  # the launcher is restarting it already
    if data.get("shared"):
        return (notice(run, incident, "; look at the storage behind the dataset"),)
    worker = stalled_worker(rank)
    if worker is not None and incident.attempts == 0:
        args: dict[str, object] = {"pid": worker[0], "run": run, "rank": index, "role": "data"}
        return (Action("kill_process", target=f"{run}/rank {index}", args=args, reason=why),)
    if supervisor is not None and supervised(view, run):
        args = {"control": supervisor.control, "reason": why}
        return (Action("restart_generation", target=run, args=args, reason=why),)
    return (notice(run, incident, "; no opsd launcher is there to restart it"),)


RUNBOOK = RunRunbook(
    first=("kill -KILL PID", "iostat -x 1 3"),
    detect=_detect,
    remedy=_remedy,
    healed=moved_on,
    verify_s=20.0,
    max_attempts=2,
    causes=(Cause("storage_slow", "node"), Cause("disk_errors", "node", lag_s=60.0)),
)
