"""Nodes that fail again and again, and whether a cluster's past failures say anything about its later ones.

A lemon is a node that fails more often than chance explains, and goes on to. On some clusters the nodes that failed
most keep failing, on others a repair makes them like any other. Therefore the score is tried on the cluster's own
history first: at several moments of the past, how many of the later failures had the tenth of the nodes that scored
highest, over the share that chance would give them (the lift)? It is measured twice. ``soon``, in the window that
follows, also counts repairs that did not hold, and says whether to prefer other nodes for the next run. ``lasting``
leaves out a whole window between, and says whether there are lemons at all. Measured: in the trace of InfiniteHBD (days
0-200) soon is 2.6 (1.9 to 3.7) and lasting 0.7 (0.4 to 1.2), so that nodes that failed there are worse for a month and
then like all others; in that of Titan's GPUs by location 6.6 (4.8 to 9.1) and 4.0 (1.9 to 8.2). Pure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

DAY_S: Final = 86_400.0
WINDOW_S: Final = 30 * DAY_S
RELAPSE_S: Final = 14 * DAY_S
"""A fault of the same kind this soon after the node's return means that the repair did not last."""
RELAPSE_WEIGHT: Final = 2.0
TOP: Final = 0.1
FALSE_SHARE: Final = 0.1
"""Of the nodes called lemons, the share that may be none (false discovery rate)."""
LEAST_NODES: Final = 5
"""Nodes of the top tenth that must have failed later: the interval is an approximation for many."""
Z_95: Final = 1.96


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A failure of ``node`` of some ``kind`` from ``at`` to ``back`` (epoch seconds; None: not back yet).

    A job that failed on the node and ran on others without it is a fault of the kind "job" that ends where it begins.
    """

    node: str
    kind: str
    at: float
    back: float | None = None


@dataclass(frozen=True, slots=True)
class Lift:
    """How many times as many failures the top tenth of the nodes had later as chance explains, with its 95 % interval.

    ``low`` is 0 and ``high`` infinite where too little has happened to tell; ``failed`` nodes of the top tenth failed
    later, ``later`` failures of all nodes were counted, at ``moments`` of the past. Before and after such a moment
    failures are counted for ``window_s``, those after it once ``lag_s`` have passed.
    """

    value: float
    low: float
    high: float
    failed: int
    later: int
    moments: int
    window_s: float = WINDOW_S
    lag_s: float = 0.0

    @property
    def proven(self) -> bool:
        """Whether a node's past said more about it than chance."""
        return self.low > 1


@dataclass(frozen=True, slots=True)
class Score:
    """A node's last 30 days: ``faults``, of which ``relapses`` came back after a repair.

    ``confidence`` is the probability that it is not chance, corrected for the number of nodes that were looked at.
    """

    node: str
    faults: int
    relapses: int
    confidence: float

    @property
    def weight(self) -> float:
        """The score of nodes. A repair that did not last counts for more than a new fault."""
        return weight(self.faults, self.relapses)


@dataclass(frozen=True, slots=True)
class Judgement:
    """``scores`` are the nodes with faults in the window, the worst first; ``mean`` is the faults of a node in it."""

    soon: Lift
    lasting: Lift
    mean: float
    scores: tuple[Score, ...]

    @property
    def lemons(self) -> tuple[Score, ...]:
        """The nodes to have repaired or replaced; none where it is not proven that the cluster has any."""
        return tuple(s for s in self.scores if s.confidence >= 1 - FALSE_SHARE) if self.lasting.proven else ()


def weight(faults: float, relapses: float) -> float:
    """The score of a node with so many faults, some of them relapses."""
    return faults + (RELAPSE_WEIGHT - 1) * relapses


def judge(nodes: Collection[str], faults: Iterable[NodeFailure], now: float, window_s: float = WINDOW_S) -> Judgement:
    """The lemons of ``nodes`` at ``now``. Faults of other nodes and later ones are left out.

    Of a history of less than three windows each window is a third, and the one that is left out no shorter than the
    time in which a fault comes back after a repair that did not last.
    """
    known = frozenset(nodes)
    past = _apart(fault for fault in faults if fault.node in known and fault.at <= now)
    span_s = now - past[0].at if past else 0.0
    part_s = min(window_s, span_s / 3)
    lag_s = max(part_s, min(RELAPSE_S, window_s))
    soon = lift_of(known, past, now, part_s, 0.0)
    lasting = lift_of(known, past, now, min(part_s, max(0.0, span_s - lag_s) / 2), lag_s)
    return Judgement(soon, lasting, *_scores(known, past, now, window_s))


def _apart(faults: Iterable[NodeFailure]) -> list[NodeFailure]:
    """The faults by time, without those of a node that is out already: a node fails again once it is back.

    Several sources tell of one outage, in words of their own, or one twice.
    """
    found: list[NodeFailure] = []
    out_until: dict[str, float] = {}
    for fault in sorted(faults, key=lambda fault: (fault.at, -(fault.back or fault.at), fault.kind)):
        if fault.at >= out_until.get(fault.node, -math.inf):
            found.append(fault)
            out_until[fault.node] = max(fault.back or fault.at, math.nextafter(fault.at, math.inf))
    return found


def lift_of(nodes: Collection[str], faults: Sequence[NodeFailure], now: float, window_s: float, lag_s: float) -> Lift:
    """How well the score of a window foretold the failures of another one that began ``lag_s`` after its end.

    The windows of several moments follow each other, the last one ends at ``now``; ``faults`` are ordered by time. Each
    moment is compared with the fleet at that moment, so that a bad month of all nodes is no lift. A window of less than
    a second, the precision of the times, tells nothing.
    """
    pairs: list[tuple[Mapping[str, float], Counter[str]]] = []
    cut = now - lag_s - window_s
    while faults and window_s >= 1 and cut - window_s >= faults[0].at - 1:
        after = Counter(fault.node for fault in faults if cut + lag_s < fault.at <= cut + lag_s + window_s)
        pairs.append((_top(nodes, _weights(faults, cut - window_s, cut)), after))
        cut -= window_s
    return replace(_lift(len(nodes), pairs), window_s=window_s, lag_s=lag_s)


def _lift(nodes: int, pairs: Sequence[tuple[Mapping[str, float], Counter[str]]]) -> Lift:
    """The lift over several moments, each with the share of nodes in the top tenth and their later failures.

    The interval is that of the logarithm by the delta method, with all moments of a node as one observation, since they
    depend on each other.
    """
    hits: defaultdict[str, float] = defaultdict(float)
    expected: defaultdict[str, float] = defaultdict(float)
    rest = 0.0
    for top, after in pairs:
        mean, share = after.total() / nodes, sum(top.values()) / nodes
        rest += share * mean
        for node in top.keys() | after.keys():
            hits[node] += top.get(node, 0.0) * after[node]
            expected[node] += top.get(node, 0.0) * mean + share * after[node]
    later, failed = sum(after.total() for _, after in pairs), sum(count > 0 for count in hits.values())
    found, chance = sum(hits.values()), rest * nodes
    if not chance:
        return Lift(1.0, 0.0, math.inf, 0, later, len(pairs))
    if failed < LEAST_NODES:
        return Lift(found / chance, 0.0, math.inf, failed, later, len(pairs))
    variance = (nodes - len(hits)) * (rest / chance) ** 2
    variance += sum((hits[node] / found - (expected[node] - rest) / chance) ** 2 for node in hits)
    value, factor = found / chance, math.exp(Z_95 * math.sqrt(variance))
    return Lift(value, value / factor, value * factor, failed, later, len(pairs))


def _top(nodes: Collection[str], weights: Mapping[str, float]) -> dict[str, float]:
    """The tenth of the nodes with the greatest weights, each with its share: nodes that tie share the places left."""
    left = TOP * len(nodes)
    top: dict[str, float] = {}
    by_weight: defaultdict[float, list[str]] = defaultdict(list)
    for node, value in weights.items():
        by_weight[value].append(node)
    for value in sorted(by_weight, reverse=True):
        share = min(1.0, left / len(by_weight[value]))
        top |= dict.fromkeys(by_weight[value], share)
        left -= share * len(by_weight[value])
        if left <= 0:
            break
    return top


def _counted(faults: Iterable[NodeFailure], start: float, end: float) -> tuple[Counter[str], Counter[str]]:
    """Faults and relapses of each node after ``start``, up to ``end``."""
    counts: Counter[str] = Counter()
    relapses: Counter[str] = Counter()
    back: dict[tuple[str, str], float] = {}
    for fault in faults:
        if fault.at > end:
            break
        before = back.get((fault.node, fault.kind))
        back[fault.node, fault.kind] = fault.back if fault.back is not None else fault.at
        if fault.at > start:
            counts[fault.node] += 1
            relapses[fault.node] += before is not None and fault.at - before < RELAPSE_S
    return counts, relapses


def _weights(faults: Iterable[NodeFailure], start: float, end: float) -> dict[str, float]:
    counts, relapses = _counted(faults, start, end)
    return {node: weight(count, relapses[node]) for node, count in counts.items()}


def _scores(
    nodes: Collection[str], faults: Sequence[NodeFailure], now: float, window_s: float
) -> tuple[float, tuple[Score, ...]]:
    """Mean faults of a node, and the scores; the confidence by Benjamini and Hochberg's step-up procedure."""
    counts, relapses = _counted(faults, now - window_s, now)
    mean = counts.total() / len(nodes) if nodes else 0.0
    found: list[Score] = []
    best = 1.0
    for count in sorted(set(counts.values())):
        as_many = sum(other >= count for other in counts.values())
        best = min(best, _at_least(count, mean) * len(nodes) / as_many)
        found += [Score(node, count, relapses[node], 1 - best) for node in counts if counts[node] == count]
    return mean, tuple(sorted(found, key=lambda score: (-score.weight, -score.confidence, score.node)))


def _at_least(count: int, mean: float) -> float:
    """The probability that a Poisson variable of this mean is ``count`` or more."""
    if mean <= 0 or count <= 0:
        return 1.0
    term = math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    total, number = 0.0, count
    while term > 1e-18 or number < mean:
        total += term
        number += 1
        term *= mean / number
    return min(1.0, total)
