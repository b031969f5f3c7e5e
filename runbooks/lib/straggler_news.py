"""Stragglers as the launcher that leads the run announces them: it sees the ranks of all nodes. A user's word."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.collectors.base import Event
from opsd.runbooks.base import Culprit, Finding, Incident, Severity, View
from opsd.runbooks.lib.losses import lost, lost_by
from opsd.runbooks.lib.runs import job_of, quoted, rank_of, ranks_of, run_over, world_size
from opsd.runbooks.lib.signals import counted, integer, integers, number, text

FOUND, GONE = "straggler_found", "straggler_gone"
VALID_S = 180.0
"""The leader repeats what lasts each minute; what it has not repeated for so long is over."""
COSTLY = 0.2
COMPONENTS = {"slow GPU": "gpu", "slow data": "data", "slow link": "network"}
"""Causes by the component that they blame, where it is not the rank or its node."""


def announced(view: View) -> Iterator[Finding]:
    """The stragglers that leaders have announced and not withdrawn."""
    newest: dict[str, Event] = {}
    for event in sorted((*view.events(FOUND, VALID_S), *view.events(GONE, VALID_S)), key=lambda event: event.at):
        newest[key(event)] = event
    for name, event in newest.items():
        if event.kind == FOUND and any(rank.run == text(event.data, "run") and rank.live for rank in view.ranks):
            yield _finding(name, event, view)


def key(event: Event) -> str:
    """What makes two announcements the same: the rank, the node of several, or the cause if nobody is to blame."""
    ranks, run = integers(event.data, "ranks"), text(event.data, "run")
    if not ranks:
        return f"{run}/{text(event.data, 'cause')}"
    return f"{run}/rank {ranks[0]}" if len(ranks) == 1 else f"{run}/ranks of {_node(event)}"


def healed(incident: Incident, view: View) -> bool | None:
    """True once the leader has taken it back or repeats it no more, or the run has ended."""
    if not view.known("ranks"):
        return None
    if any(finding.key == incident.key for finding in announced(view)):
        return False
    over = run_over(incident, view)
    return True if over is None else over or any(rank.live for rank in view.ranks)


def _node(event: Event) -> str:
    nodes = event.data.get("culprit_nodes")
    return str(nodes[0]) if isinstance(nodes, list | tuple) and nodes else text(event.data, "node")


def _finding(name: str, event: Event, view: View) -> Finding:
    data = event.data
    run, cause, ranks = text(data, "run"), text(data, "cause"), integers(event.data, "ranks")
    slowdown = max(1.0, number(data, "slowdown") or 1.0)
    cost = 1.0 - 1.0 / slowdown
    sentences = data.get("evidence")
    said = [str(one) for one in sentences] if isinstance(sentences, list | tuple) else []
    several = f": {counted(len(ranks), 'rank')} on {_node(event)}"
    who = several if len(ranks) > 1 else f": rank {ranks[0]}" if ranks else ""
    compared = f"compared: {counted(integer(data, 'compared', 0), 'rank')} of the job"
    told = rank_of(view, run, ranks[0]) if ranks else next(iter(ranks_of(view, run)), None)
    return Finding(
        key=name,
        severity=Severity.INFO if not ranks else Severity.CRITICAL if cost >= COSTLY else Severity.WARNING,
        summary=f"{cause} in {run}{who}; steps take {slowdown:.2f} times as long",
        culprit=_culprit(cause, ranks, run, view),
        confidence=min(1.0, max(0.0, number(data, "confidence") or 0.5)),
        evidence=quoted(event, "launcher", *said, compared, text(data, "advice")),
        cost=lost(view, told, cost) if told else lost_by(f"run {run}", cost, world_size(view, run)),
        job=job_of(view, run),
        data={
            "run": run, "rank": ranks[0] if ranks else None, "generation": integer(data, "generation"), "leader": True,
        },
    )  # fmt: skip


def _culprit(cause: str, ranks: list[int], run: str, view: View) -> Culprit:
    if not ranks:
        return Culprit("user code", detail=cause)
    page = rank_of(view, run, ranks[0])
    gpu = page.gpu if page is not None and len(ranks) == 1 else None
    component = COMPONENTS.get(cause, "rank" if len(ranks) == 1 else "node")
    return Culprit(component, view.node, gpu, ranks[0] if len(ranks) == 1 else None, cause)
