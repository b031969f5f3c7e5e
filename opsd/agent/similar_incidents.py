"""Statistics of past incidents by kind, and which are similar to a given one, with their actions and results.

Everything is computed on demand from the incidents in the journal. Pure.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from opsd.runbooks.base import Incident, State

LIKE = 0.3
"""Minimum similarity of an incident that is shown; the same kind alone is not enough."""

Signature = Mapping[str, float]
"""Feature -> weight."""

_KIND, _COMPONENT, _REASON, _PLACE = 2.0, 1.0, 1.5, 0.5
_XID = re.compile(r"\bXid\D{0,12}?(\d{1,3})\b")
_EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt)\b")
_SIGNAL = re.compile(r"\bSIG[A-Z]{2,6}\b")
_WORD = re.compile(r"[a-z][a-z_]{3,}")


@dataclass(frozen=True, slots=True)
class Similar:
    """A past incident: similarity (0 to 1), executed verbs, and whether they helped (None: no verb was executed)."""

    incident: Incident
    similarity: float
    done: tuple[str, ...]
    helped: bool | None


@dataclass(frozen=True, slots=True)
class KindStatistics:
    """Statistics of incidents of one kind. Seconds are medians; shares are of those that are over.

    ``detect_s`` is from the oldest evidence to the opening, ``resolve_s`` from there to the end; None without data.
    """

    kind: str
    count: int
    detect_s: float | None
    resolve_s: float | None
    by_itself: float
    by_action: float
    escalated: float


def signature(incident: Incident) -> Signature:
    """The features by which ``incident`` is compared: kind, component, GPU, and words of the reasons.

    Numbers that differ between occurrences (steps, ranks, seconds) are not part of it.
    """
    said = " ".join([incident.summary, incident.culprit.detail, *(evidence.text for evidence in incident.evidence)])
    features = {f"kind {incident.kind}": _KIND, f"component {incident.culprit.component}": _COMPONENT}
    for name, pattern in (("xid", _XID), ("exception", _EXCEPTION), ("signal", _SIGNAL)):
        features |= {f"{name} {found}": _REASON for found in pattern.findall(said)}
    features |= {f"reason {word}": _REASON for word in _WORD.findall(incident.culprit.detail.lower())}
    if incident.culprit.gpu is not None:
        features[f"gpu {incident.culprit.gpu}"] = _PLACE
    return features


def similarity(one: Signature, other: Signature) -> float:
    """Weighted Jaccard index, from 0 to 1: the shared weight divided by the combined weight."""
    union = one.keys() | other.keys()
    whole = math.fsum(max(one.get(name, 0.0), other.get(name, 0.0)) for name in union)
    shared = math.fsum(min(one.get(name, 0.0), other.get(name, 0.0)) for name in union)
    return shared / whole if whole else 0.0


def nearest(incident: Incident, past: Iterable[Incident], limit: int = 3) -> list[Similar]:
    """The past incidents most similar to ``incident``, best first, newest first among equals."""
    own = signature(incident)
    over = (other for other in past if other.resolved_at is not None and other.id != incident.id)
    rated = [(similarity(own, signature(other)), other) for other in over]
    best = sorted((pair for pair in rated if pair[0] >= LIKE), key=lambda p: (-p[0], -p[1].opened_at))
    return [Similar(other, round(score, 3), _done(other), _helped(other)) for score, other in best[:limit]]


def statistics(incidents: Iterable[Incident]) -> list[KindStatistics]:
    """One for each kind, most frequent first. Symptoms are left out, because they end when their cause does."""
    kinds: defaultdict[str, list[Incident]] = defaultdict(list)
    for incident in incidents:
        if incident.cause is None:
            kinds[incident.kind].append(incident)
    return sorted((_statistics_of(kind, group) for kind, group in kinds.items()), key=lambda r: (-r.count, r.kind))


def _statistics_of(kind: str, group: Sequence[Incident]) -> KindStatistics:
    over = [incident for incident in group if incident.resolved_at is not None]

    def share(number: int) -> float:
        return number / len(over) if over else 0.0

    escalated = sum(incident.state is State.ESCALATED for incident in over)
    acted = sum(incident.state is State.RESOLVED and incident.attempts > 0 for incident in over)
    return KindStatistics(
        kind=kind,
        count=len(group),
        detect_s=_median(max(0.0, i.opened_at - min(e.at for e in i.evidence)) for i in group if i.evidence),
        resolve_s=_median(i.resolved_at - i.opened_at for i in over if i.resolved_at is not None),
        by_itself=share(sum(incident.state is State.RESOLVED for incident in over) - acted),
        by_action=share(acted),
        escalated=share(escalated),
    )


def _median(values: Iterator[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _done(incident: Incident) -> tuple[str, ...]:
    carried_out = (str(action["verb"]) for action in incident.actions if action.get("outcome") == "ok")
    return tuple(dict.fromkeys(carried_out))


def _helped(incident: Incident) -> bool | None:
    """True if it ended after an attempt, False if it escalated after an attempt, None if neither is known."""
    return incident.state is State.RESOLVED if incident.attempts and incident.state is not State.UNPROVEN else None
