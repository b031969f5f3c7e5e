"""Which incidents are symptoms of which, so that a root and its symptoms are one alarm. Pure.

The ``causes`` of a runbook say which kinds can cause it, what the two must have in common and how close in time they
must be. A symptom triggers no action and no notification; it ends with its root or later. A root may be found after its
symptoms, which are then assigned to it. The cause of an incident is always a root, even over several links.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from opsd.agent.incidents import IncidentTable
from opsd.collectors.base import RankFact
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Cause, Common, Incident

LEAD_S = 60.0
"""A root may be found this many seconds later than its symptom, as detectors need different times."""
RELEASE_S = 120.0
"""A symptom that lasts longer than this after the end of its root becomes an incident of its own."""

CAUSES: Mapping[str, tuple[Cause, ...]] = {table.kind: table.causes for table in RUNBOOKS}

Place = tuple[object, ...]


def correlate(
    current: Collection[Incident], ended: Iterable[Incident], ranks: Sequence[RankFact], now: float
) -> dict[str, str | None]:
    """Incident id -> id of its root, None for a root, for every current incident.

    ``ended`` are remembered incidents, ``ranks`` those on this node (for which GPU belongs to which run), ``now`` is in
    epoch seconds.
    """
    over = [i for i in ended if i.resolved_at is not None and now - i.resolved_at <= RELEASE_S]
    known = {incident.id: incident for incident in (*over, *current)}
    places = {id: _places(incident, ranks) for id, incident in known.items()}
    parents = {incident.id: incident.cause for incident in over}
    for incident in current:
        parents[incident.id] = _parent(incident, known, places)
    return {incident.id: _root(incident.id, parents, known) for incident in current}


def linked(table: IncidentTable, causes: Mapping[str, str | None]) -> IncidentTable:
    """The table with the ``causes`` that ``correlate`` has found."""
    changed = {
        name: replace(incident, cause=causes[incident.id])
        for name, incident in table.incidents.items()
        if incident.cause != causes[incident.id]
    }
    return replace(table, incidents={**table.incidents, **changed}) if changed else table


def held(current: Collection[Incident]) -> frozenset[str]:
    """The ids of symptoms whose cause is current."""
    ids = {incident.id for incident in current}
    return frozenset(incident.id for incident in current if incident.cause in ids)


def symptoms_of(root: str, incidents: Iterable[Incident]) -> list[Incident]:
    """The symptoms of the incident with the id ``root``, oldest first."""
    return sorted((i for i in incidents if i.cause == root), key=lambda i: (i.opened_at, i.id))


def joint_gpu_seconds(incidents: Sequence[Incident]) -> float:
    """GPU-seconds lost to all of ``incidents``; overlapping losses count once.

    Each loss is spread evenly over the time from its opening until it was last seen (at least 1 s); at any moment
    the most expensive incident counts. The result is between the largest loss and the sum of all.
    """
    spans = [(i.opened_at, max(i.last_seen_at, i.opened_at + 1.0), i.cost.gpu_seconds) for i in incidents]
    edges = sorted({edge for start, end, _ in spans for edge in (start, end)})
    total = 0.0
    for left, right in pairwise(edges):
        rates = (lost / (end - start) for start, end, lost in spans if start <= left and right <= end)
        total += (right - left) * max(rates, default=0.0)
    return total


def _parent(
    incident: Incident, known: Mapping[str, Incident], places: Mapping[str, Mapping[Common, set[Place]]]
) -> str | None:
    """The cause of ``incident``: its present one while that is current, else the best candidate or the present one."""
    old = known.get(incident.cause or "")
    if old is not None and not _can_follow(incident.kind, old.kind):
        old = None
    if old is not None and old.resolved_at is None:
        return old.id
    candidates = [
        (number, _distance(incident, root, cause), root.id)
        for number, cause in enumerate(CAUSES.get(incident.kind, ()))
        for root in known.values()
        if root.kind == cause.kind
        and places[incident.id][cause.by] & places[root.id][cause.by]
        and _fits(incident, root, cause)
    ]
    if candidates:
        return min(candidates)[2]
    return old.id if old is not None else None


def _fits(symptom: Incident, root: Incident, cause: Cause) -> bool:
    """True if the two lie close enough in time, and the runbook agrees."""
    if not cause.fits(symptom, root) or (cause.by == "gpu" and symptom.culprit.component == "data"):
        return False
    if cause.within_s is not None:
        return _distance(symptom, root, cause) <= cause.within_s
    began_in_time = symptom.opened_at >= root.opened_at - LEAD_S
    return began_in_time and (root.resolved_at is None or symptom.opened_at <= root.resolved_at + cause.lag_s)


def _distance(symptom: Incident, root: Incident, cause: Cause) -> float:
    """Seconds between the opening of ``symptom`` and the nearest moment at which ``root`` struck."""
    last = root.data.get("at") if cause.within_s is not None else None
    moments = (root.opened_at, last) if isinstance(last, int | float) else (root.opened_at,)
    return min(abs(symptom.opened_at - moment) for moment in moments)


def _places(incident: Incident, ranks: Sequence[RankFact]) -> Mapping[Common, set[Place]]:
    """What ``incident`` affects: its GPUs, ranks, runs and node, each as comparable tuples.

    A rank of another generation is a different rank, because the cause of a hang ends with the generation.
    """
    culprit, data = incident.culprit, incident.data
    named, gpu = data.get("run"), culprit.gpu if culprit.gpu is not None else data.get("gpu")
    own = [
        rank
        for rank in ranks
        if (rank.run == named if named is not None else gpu is not None and rank.gpu == gpu)
        and culprit.rank in (None, rank.rank)
    ]
    runs = {named} if named is not None else {rank.run for rank in own}
    numbers = {culprit.rank} if culprit.rank is not None else {rank.rank for rank in own}
    gpus = {gpu} if gpu is not None else {rank.gpu for rank in own if rank.gpu is not None}
    return {
        "gpu": {(culprit.node, gpu) for gpu in gpus},
        "rank": {(run, number, data.get("generation")) for run in runs for number in numbers},
        "run": {(run,) for run in runs},
        "node": {(culprit.node,)},
    }


def _can_follow(kind: str, root: str) -> bool:
    """True if causes lead from ``kind`` to ``root``, in one step or several."""
    return any(cause.kind == root or _can_follow(cause.kind, root) for cause in CAUSES.get(kind, ()))


def _root(id: str, parents: Mapping[str, str | None], known: Mapping[str, Incident]) -> str | None:
    """The end of the chain that begins at ``id``; causes have no cycles, so that there is one."""
    above = parents.get(id)
    if above is None or above not in known:
        return None
    return _root(above, parents, known) or above
