"""Which nodes to take for a run: healthy ones, near each other. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from opsd.slurm.topology import Topology


@dataclass(frozen=True, slots=True)
class Choice:
    """The nodes that were picked, by name, and the smallest switch above all of them, "" if none is known."""

    nodes: tuple[str, ...]
    switch: str


def pick(badness: Mapping[str, float], count: int, topology: Topology) -> Choice | None:
    """The ``count`` nodes of the least total badness; among such choices those nearest each other.

    First comes the lowest switch that has them, of equals the one with the fewest other candidates, then the fullest
    leaves, so that as few leaves as possible are used and whole ones stay free. None if there are too few nodes.
    """
    if not 0 < count <= len(badness):
        return None
    groups: list[tuple[float, int, int, str, list[str]]] = []
    for switch, below in topology.nodes.items():
        if len(names := [name for name in below if name in badness]) >= count:
            groups.append((_least(badness, names, count), topology.height(switch), len(names), switch, names))
    if not groups or badness.keys() - topology.leaf.keys():
        everything = max((height for _, height, *_ in groups), default=0) + 1
        groups.append((_least(badness, badness, count), everything, len(badness), "", list(badness)))
    *_, switch, names = min(groups)
    return Choice(tuple(sorted(_nearest(badness, names, count, topology))), switch)


def _least(badness: Mapping[str, float], names: Iterable[str], count: int) -> float:
    return sum(sorted(badness[name] for name in names)[:count])


def _nearest(badness: Mapping[str, float], names: Collection[str], count: int, topology: Topology) -> list[str]:
    """Of the best nodes those on the fullest leaves."""
    limit = sorted(badness[name] for name in names)[count - 1]
    chosen = [name for name in names if badness[name] < limit]
    leaves: dict[str, list[str]] = {}
    for name in sorted(names):
        if badness[name] == limit:
            leaves.setdefault(topology.leaf.get(name, ""), []).append(name)
    used = {topology.leaf.get(name, "") for name in chosen}
    while len(chosen) < count:
        left = count - len(chosen)
        best = min(leaves, key=lambda leaf: _order(leaf in used, len(leaves[leaf]), left, leaf))
        chosen += leaves.pop(best)[:left]
    return chosen


def _order(used: bool, free: int, left: int, leaf: str) -> tuple[bool, bool, int, str]:
    """Leaves in use come first, then of those that have all that is left the smallest, then the largest."""
    enough = free >= left
    return not used, not enough, free if enough else -free, leaf
