"""Every rank of this node waits in a collective that does not end: the network, or a rank of another node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Cause, Cost, Culprit, Evidence, Finding, Severity, View
from opsd.runbooks.lib.remedies import RunRunbook, notify_unsupervised
from opsd.runbooks.lib.runs import downtime, job_of, last_step, quoted, rank_then, ranks_of, user_of
from opsd.runbooks.lib.signals import counted, integer, integers, latest, number, text
from opsd.runbooks.rank_hang import hangs, limit_of, moved_on, reported_states, state_of, waits_for_others

RAS_UP = "opsd_nccl_ras_up"
NAMES_EARLY_S = 30.0
"""NCCL may have reported the fault this many seconds before the hang was detected."""

SILENT = ("incomplete", "dead")
BEHIND = ("mismatch", "error")
"""What NCCL's RAS says of ranks: they do not answer; or they answer, and are behind the others or report an error."""


def _from_launcher(event: Event, view: View) -> Finding | None:
    data = event.data
    if number(data, "rank") is not None or not waits_for_others(reported_states(event)):
        return None
    run, generation, stuck = text(data, "run"), integer(data, "generation"), number(data, "stuck_s") or 0.0
    stacks = text(data, "stacks")
    said = f"all ranks here have waited in a collective for {stuck:.1f} s; the limit is {text(data, 'limit_s')} s"
    return _finding(
        view, run, generation, quoted(event, "launcher", said, f"stacks of all ranks: {stacks}" if stacks else ""),
        cost=downtime(view, event, event.at - stuck), job=job_of(view, run), data={"since": event.at - stuck},
    )  # fmt: skip


def _from_pages(view: View, run: str) -> Finding | None:
    """The hang of a run that no launcher watches: all ranks here wait for longer than their past allows."""
    ranks = [rank for rank in ranks_of(view, run) if rank.live]
    if not waits_for_others([state_of(rank, view.now) for rank in ranks]):
        return None
    longest = min(ranks, key=lambda rank: rank.changed)
    stuck = view.now - longest.changed
    if stuck < limit_of(longest):
        return None
    world = longest.world_size
    said = f"all {len(ranks)} ranks here wait in a collective; their past allows {limit_of(longest):.0f} s"
    return _finding(
        view, run, longest.generation, (Evidence(said, "rank pages", view.wall),),
        cost=Cost(1.0, stuck * world, f"{counted(world, 'GPU')} stood still for {stuck:.0f} s", world),
        job=longest.job,
        data={"rank": longest.rank, "step": last_step(longest), "since": view.wall - stuck},
    )  # fmt: skip


def _finding(
    view: View, run: str, generation: int, evidence: tuple[Evidence, ...], *, cost: Cost, job: str,
    data: Mapping[str, object],
) -> Finding:  # fmt: skip
    return Finding(
        key=f"{run}/generation {generation}",
        severity=Severity.CRITICAL,
        summary=f"{run} hangs in a collective, and no rank of {view.node} holds it up",
        culprit=Culprit("unknown", view.node, detail="the network or a rank of another node"),
        confidence=0.3,
        evidence=evidence,
        cost=cost,
        job=job,
        data={"run": run, "generation": generation, **data},
    )


def _diagnose(finding: Finding, view: View) -> Finding:
    """Who is missing, by PyTorch's flight recorder, else by NCCL's RAS; what NCCL wrote into the logs is added."""
    run, since = text(finding.data, "run"), (number(finding.data, "since") or view.wall) - NAMES_EARLY_S
    back = view.wall - since
    records = [e for e in view.events("nccl_flight_recorder", back) if text(e.data, "run") == run]
    problems = [e for e in view.events("nccl_ras", back) if text(e.data, "kind") in (*SILENT, *BEHIND)]
    problems = [e for e in problems if e.user == user_of(view, run)]  # RAS runs in the ranks of one user
    logs = [e for e in view.events("nccl_log", back) if text(e.data, "run") == run and e.data.get("kind") != "warning"]
    told = [(e, source) for events, source in ((records, "flight recorder"), (problems, "NCCL RAS")) for e in events]
    named = (
        [(_recorded(records[-1], run, view), number(records[-1].data, "confidence") or 0.85)]
        if records
        else [(_by_ras(e, view), 0.7) for e in problems]
    )
    found = next(((culprit, sure) for culprit, sure in named if culprit is not None), None)
    evidence = [Evidence(event.message, source, event.at) for event, source in told[-4:]]
    evidence += [Evidence(event.message, "rank log", event.at) for event in logs[-2:]]
    if not told and latest(view, RAS_UP) == 0:
        evidence.append(Evidence("NCCL's RAS service does not answer: it names no rank", "NCCL RAS", view.wall))
    finding = replace(finding, evidence=(*finding.evidence, *evidence))
    return finding if found is None else replace(finding, culprit=found[0], confidence=found[1])


def _recorded(event: Event, run: str, view: View) -> Culprit:
    """The rank that keeps the others waiting, or the network if all have come."""
    ranks = integers(event.data, "culprits")
    what = f"{text(event.data, 'operation')} {text(event.data, 'sequence')} of group {text(event.data, 'group')}"
    if not ranks:
        return Culprit("network", view.node, detail=f"every rank has come to {what}")
    page = rank_then(view, run, ranks[0], event.at)
    others = f", with {counted(len(ranks) - 1, 'other')}" if len(ranks) > 1 else ""
    cause = text(event.data, "cause") or "never called"
    node, gpu = (view.node, page.gpu) if page is not None else (None, None)
    return Culprit("rank", node, gpu, ranks[0], f"{cause}: {what}{others}")


def _by_ras(event: Event, view: View) -> Culprit | None:
    """The process that RAS names first, by its node and GPU; its number counts within a communicator only."""
    listed = event.data.get("ranks")
    first = listed[0] if isinstance(listed, list | tuple) and listed else None
    if not isinstance(first, Mapping) or not text(first, "host"):
        return None
    node, pid, gpu = text(first, "host"), integer(first, "pid"), integer(first, "gpu")
    named = [page for page in view.ranks if node == view.node and page.user == event.user and _own_number(page) == pid]
    if len(named) > 1:  # each in a container of its own
        named = [page for page in named if page.gpu == gpu]
    rank = named[0].rank if len(named) == 1 else None
    return Culprit("rank", node, gpu if gpu >= 0 else None, rank, f"pid {pid}: {text(event.data, 'text')}")


def _own_number(rank: RankFact) -> int:
    """The number by which a process knows itself, which NCCL tells."""
    return rank.pid if rank.inside is None else rank.inside


RUNBOOK = RunRunbook(
    first=("opsd diagnose --job JOB", "opsd diagnose"),
    detect=hangs(_from_launcher, _from_pages),
    diagnose=_diagnose,
    remedy=notify_unsupervised,
    healed=moved_on,
    verify_s=180.0,
    causes=(Cause("gpu_lost", "gpu", within_s=60.0), Cause("gpu_xid", "gpu", within_s=60.0), Cause("ib_link", "node")),
)
