"""Which incidents are symptoms of which: one root with what it brings about, not one alarm for each. Pure.

``LINKS`` says which kind can bring about which, what the two must have in common and how close in time they must lie.
A symptom does not act and is not announced; it ends with its root or after it. A root may turn up later than its
symptoms: they are adopted then. A cause always is a root itself, however many steps lie in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from opsd.agent.incidents import Book
from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cost, Incident, Severity

LEAD_S = 60.0
"""A root may be found this much later than its symptom: detectors differ in how long they look."""
RELEASE_S = 120.0
"""A symptom that goes on for longer than this after the end of its root is an incident of its own from then on."""

Common = Literal["gpu", "rank", "run", "node"]


@dataclass(frozen=True, slots=True)
class Link:
    """Incidents of kind ``root`` can bring about those of kind ``symptom`` if they share their ``by``.

    The root lasts: a symptom may open while it is current and up to ``lag_s`` after its end. With ``within_s`` it
    strikes: the symptom opens at most that many seconds from a moment at which it did.
    """

    symptom: str
    root: str
    by: Common
    within_s: float | None = None
    lag_s: float = 10.0


LINKS: tuple[Link, ...] = (
    Link("rank_crash", "gpu_lost", "gpu", within_s=60.0),
    Link("rank_crash", "gpu_xid", "gpu", within_s=60.0),
    Link("rank_crash", "host_memory", "node"),
    Link("rank_hang", "gpu_lost", "gpu", within_s=60.0),
    Link("rank_hang", "gpu_xid", "gpu", within_s=60.0),
    Link("rank_hang", "dataloader_stall", "rank"),
    Link("rank_hang", "ib_link", "node"),
    Link("collective_hang", "gpu_lost", "gpu", within_s=60.0),
    Link("collective_hang", "gpu_xid", "gpu", within_s=60.0),
    Link("collective_hang", "ib_link", "node"),
    Link("straggler", "gpu_throttle", "gpu", lag_s=60.0),
    Link("straggler", "pcie_degraded", "gpu", lag_s=60.0),
    Link("straggler", "dataloader_stall", "rank"),
    Link("throughput_drop", "gpu_throttle", "gpu", lag_s=60.0),
    Link("throughput_drop", "pcie_degraded", "gpu", lag_s=60.0),
    Link("throughput_drop", "straggler", "run", lag_s=60.0),
    Link("throughput_drop", "ib_link", "node", lag_s=60.0),
    Link("throughput_drop", "storage_slow", "node", lag_s=60.0),
    Link("dataloader_stall", "storage_slow", "node"),
    Link("storage_slow", "nvme_failing", "node", lag_s=60.0),
    Link("checkpoint_stale", "nvme_failing", "node", lag_s=60.0),
    Link("checkpoint_slow", "storage_slow", "node", lag_s=60.0),
    Link("checkpoint_stale", "storage_full", "node", lag_s=60.0),
)
"""In the order of preference where a symptom could have several roots. Kinds that are not here stand for themselves."""

KILLED_FOR_MEMORY = "SIGKILL"
"""How a rank ends that the kernel ended for want of memory; a rank that ends otherwise has another reason."""

Place = tuple[object, ...]


def correlate(
    current: Collection[Incident], ended: Iterable[Incident], ranks: Sequence[RankFact], now: float
) -> dict[str, str | None]:
    """Incident id -> id of its root, None for a root, for every current incident.

    ``ended`` are remembered incidents, ``ranks`` those on this node (they say which GPU belongs to which run), ``now``
    is epoch seconds.
    """
    over = [i for i in ended if i.resolved_at is not None and now - i.resolved_at <= RELEASE_S]
    known = {incident.id: incident for incident in (*over, *current)}
    places = {id: _places(incident, ranks) for id, incident in known.items()}
    parents = {incident.id: incident.cause for incident in over}
    for incident in current:
        parents[incident.id] = _parent(incident, known, places)
    return {incident.id: _root(incident.id, parents, known) for incident in current}


def linked(book: Book, causes: Mapping[str, str | None]) -> Book:
    """The book with the ``causes`` that ``correlate`` has found."""
    changed = {
        name: replace(incident, cause=causes[incident.id])
        for name, incident in book.incidents.items()
        if incident.cause != causes[incident.id]
    }
    return replace(book, incidents={**book.incidents, **changed}) if changed else book


def held(current: Collection[Incident]) -> frozenset[str]:
    """The ids of symptoms whose cause is current."""
    ids = {incident.id for incident in current}
    return frozenset(incident.id for incident in current if incident.cause in ids)


def symptoms_of(root: str, incidents: Iterable[Incident]) -> list[Incident]:
    """The symptoms of the incident with the id ``root``, oldest first."""
    return sorted((i for i in incidents if i.cause == root), key=lambda i: (i.opened_at, i.id))


def joint_gpu_seconds(incidents: Sequence[Incident]) -> float:
    """GPU-seconds lost to all of ``incidents``, what several of them report for the same time counted once.

    Each loss is spread evenly over the time from its opening until it was last seen (one second at least); at any
    moment the dearest incident counts. The sum is neither less than the largest loss nor more than all of them.
    """
    spans = [(i.opened_at, max(i.last_seen_at, i.opened_at + 1.0), i.cost.gpu_seconds) for i in incidents]
    edges = sorted({edge for start, end, _ in spans for edge in (start, end)})
    total = 0.0
    for left, right in pairwise(edges):
        rates = (lost / (end - start) for start, end, lost in spans if start <= left and right <= end)
        total += (right - left) * max(rates, default=0.0)
    return total


def joint_cost(root: Incident, symptoms: Sequence[Incident]) -> Cost:
    """What ``root`` costs together with its symptoms: the largest share of throughput, and the losses counted once."""
    group = (root, *symptoms)
    share = max(incident.cost.throughput_ratio for incident in group)
    return replace(root.cost, throughput_ratio=share, gpu_seconds=joint_gpu_seconds(group))


def _parent(
    incident: Incident, known: Mapping[str, Incident], places: Mapping[str, Mapping[Common, set[Place]]]
) -> str | None:
    """What brought ``incident`` about: the cause it has while that is current, else the best candidate or the old."""
    old = known.get(incident.cause or "")
    if old is not None and not _can_follow(incident.kind, old.kind):
        old = None
    if old is not None and old.resolved_at is None:
        return old.id
    candidates = [
        (number, _distance(incident, root, link), root.id)
        for number, link in enumerate(LINKS)
        if link.symptom == incident.kind
        for root in known.values()
        if root.kind == link.root
        and places[incident.id][link.by] & places[root.id][link.by]
        and _fits(incident, root, link)
    ]
    if candidates:
        return min(candidates)[2]
    return old.id if old is not None else None


def _fits(symptom: Incident, root: Incident, link: Link) -> bool:
    """True if the two lie close enough in time."""
    if link.root == "host_memory" and (KILLED_FOR_MEMORY not in symptom.summary or root.severity != Severity.CRITICAL):
        return False
    if link.by == "gpu" and symptom.culprit.component == "data":
        return False
    if link.within_s is not None:
        return _distance(symptom, root, link) <= link.within_s
    began_in_time = symptom.opened_at >= root.opened_at - LEAD_S
    return began_in_time and (root.resolved_at is None or symptom.opened_at <= root.resolved_at + link.lag_s)


def _distance(symptom: Incident, root: Incident, link: Link) -> float:
    """Seconds between the opening of ``symptom`` and the nearest moment at which ``root`` struck."""
    last = root.data.get("at") if link.within_s is not None else None
    moments = (root.opened_at, last) if isinstance(last, int | float) else (root.opened_at,)
    return min(abs(symptom.opened_at - moment) for moment in moments)


def _places(incident: Incident, ranks: Sequence[RankFact]) -> Mapping[Common, set[Place]]:
    """What ``incident`` concerns: its GPUs, ranks, runs and node, each as tuples that can be compared.

    A rank of another generation is another one: what made it hang ended with it.
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
    """True if the table leads from ``kind`` to ``root``, in one step or several."""
    return any(above == root or _can_follow(above, root) for above in _above(kind))


def _above(kind: str) -> Iterator[str]:
    return (link.root for link in LINKS if link.symptom == kind)


def _root(id: str, parents: Mapping[str, str | None], known: Mapping[str, Incident]) -> str | None:
    """The end of the chain that begins at ``id``; the table has no cycles, so that there is one."""
    above = parents.get(id)
    if above is None or above not in known:
        return None
    return _root(above, parents, known) or above
