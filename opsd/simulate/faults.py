"""Faults of nodes, and what can be said of them without playing a run. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal, Protocol

NodeEffect = Literal["lost", "hardware", "degraded", "process", "launcher", "link", "hang", "corruption"]
"""What a fault does: the node stops answering; a rank fails with its GPU or NIC; the node works on and should be
replaced; a rank or a launcher dies and the node is sound; a connection breaks; a rank hangs; or the node computes wrong
values, which is noticed later."""
ClusterEffect = Literal["storage", "controller"]
"""What fails for all nodes at once."""
Effect = NodeEffect | ClusterEffect
PASSING: Final = ("process", "launcher", "link", "hang", "storage", "controller")
"""What leaves no node to repair."""
CLUSTER: Final = -1
"""In place of a node."""
SEVERITY: Final = ("degraded", "hardware", "lost")
"""A node that is broken may break worse; what is no worse makes no difference then."""
DAY_S = 86_400.0
HOUR_S = 3600.0


class FaultsError(ValueError):
    """A trace or rates that cannot be used; the message is one sentence with the fix."""


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """``node`` (counted from 0) is out from ``start_s`` to ``end_s``. One that began before second 0 is negative.

    One that is noticed ``noticed_s`` seconds after it began is out from then on.
    """

    node: int
    start_s: float
    end_s: float
    kind: str
    effect: Effect
    speed: float = 1.0
    """Of a degraded node while the fault lasts; its job is no faster."""
    noticed_s: float = 0.0


class FaultSource(Protocol):
    """Where faults come from: a trace or rates."""

    @property
    def name(self) -> str:
        """The message to people."""

    @property
    def per_node_day(self) -> float:
        """Expected faults of a node in a day, for the checkpoint interval."""

    def draw(self, nodes: int, seconds: float, seed: int) -> list[SimulatedFault]:
        """The faults of ``nodes`` nodes in ``seconds``, by time.

        With the same ``seed`` a node has the same faults in a larger cluster: policies and numbers of spares are
        compared on the same draw.
        """


def down_at_once(faults: Iterable[SimulatedFault], seconds: float) -> Mapping[int, float]:
    """For how many seconds 0, 1, 2 … nodes are out of service at once. Faults of one node must not overlap."""
    changes: list[tuple[float, int]] = []
    for fault in faults:
        begin, end = max(0.0, fault.start_s + fault.noticed_s), min(seconds, fault.end_s)
        if fault.effect not in PASSING and begin < end:
            changes += [(begin, 1), (end, -1)]
    changes.sort()
    level, since = 0, 0.0
    held: dict[int, float] = defaultdict(float)
    for at, change in changes:
        held[level] += at - since
        level, since = level + change, at
    held[level] += seconds - since
    return held


def level_at(held: Mapping[int, float], share: float) -> int:
    """The least level that is not exceeded for ``share`` (0 to 1) of the time in ``held``."""
    wanted, seen = share * sum(held.values()), 0.0
    for level in sorted(held):
        seen += held[level]
        if seen >= wanted - 1e-6:
            return level
    return 0


@dataclass(frozen=True, slots=True)
class SparesNeeded:
    """Spares with which a job has its nodes for a share of the time: on the average of the draws, in 95 % of them."""

    mean: int
    p95: int


def spares_needed(source: FaultSource, nodes: int, *, seconds: float, draws: int, up: float = 0.99) -> SparesNeeded:
    """The spares with which a job of ``nodes`` nodes can have all of them for the share ``up`` of ``seconds``.

    Only repairs count here, not the time that a swap takes. Spares fail like other nodes.
    """
    drawn = [source.draw(2 * nodes, seconds, seed) for seed in range(draws)]

    def enough(spares: int, of_draws: Callable[[list[float]], bool]) -> bool:
        return of_draws([_up(faults, nodes, spares, seconds) for faults in drawn])

    def least(of_draws: Callable[[list[float]], bool]) -> int:
        # Another spare never takes time away, since it is at most one more node that is down.
        return bisect_left(range(nodes), True, key=lambda spares: enough(spares, of_draws))

    mean = least(lambda ups: fmean(ups) >= up)
    return SparesNeeded(mean, least(lambda ups: sum(one >= up for one in ups) >= 0.95 * len(ups)))


def _up(faults: Iterable[SimulatedFault], nodes: int, spares: int, seconds: float) -> float:
    """The share of the time in which at most ``spares`` of ``nodes + spares`` nodes are down."""
    held = down_at_once((fault for fault in faults if fault.node < nodes + spares), seconds)
    return sum(time for level, time in held.items() if level <= spares) / seconds
