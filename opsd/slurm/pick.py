"""Which nodes to take for a run: healthy ones, near each other, with no bad way between them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from opsd.slurm.port import Partition
from opsd.slurm.topology import Topology

LOOKED_AT: Final = 128
"""Sets of leaves to leave out that are looked at, for whether enough nodes are left; seven bad ways have no more."""
TRIED: Final = 8
"""Those of them with which the last choice is compared."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The nodes that were picked, by name, the lowest switch above all of them and the NVLink domain that all share.

    Both are "" if there is none, or none is known. ``partition`` is the one to which all belong. ``bad_ways`` are those
    between leaf switches above them that were bad when last measured, and could not be avoided.
    """

    nodes: tuple[str, ...]
    switch: str
    domain: str = ""
    partition: str = ""
    bad_ways: tuple[tuple[str, str], ...] = ()


def for_runs(partitions: Iterable[Partition]) -> list[Partition]:
    """Those that start jobs; none of a tier below Slurm's default, whose jobs give way to all, if there are others."""
    up = [one for one in partitions if one.state == "up"]
    return [one for one in up if one.tier > 0] or up


def pick_in_one(
    partitions: Iterable[Partition], badness: Mapping[str, float], count: int, topology: Topology
) -> Choice | None:
    """The best ``pick`` within one of ``partitions``, as a job has one: with the fewest bad ways, then the best."""
    found: list[tuple[int, tuple[float, bool, float], Choice]] = []
    for partition in partitions:
        offered = {name: badness[name] for name in partition.nodes if name in badness}
        if choice := pick(offered, count, topology):
            order = _order_of(choice, badness, topology)
            found.append((len(choice.bad_ways), order, replace(choice, partition=partition.name)))
    return min(found, key=lambda one: one[:2])[-1] if found else None


def pick(badness: Mapping[str, float], count: int, topology: Topology) -> Choice | None:
    """The ``count`` nodes of the least total badness without a bad way; among such choices those nearest each other.

    An NVLink domain that has them comes first, then the lowest such switch. Of equals the one with the fewest other
    candidates is taken. Within it the fullest domains or leaves come first, so that whole ones stay free. A bad way is
    accepted if without it there are too few nodes. None if there are too few nodes that are connected: nodes below
    switches with none above both are not.
    """
    choice = _best(badness, count, topology, (), 1)
    avoided: list[tuple[str, str]] = []
    accepted: set[tuple[str, str]] = set()
    while choice is not None and (ways := [way for way in topology.bad_ways(choice.nodes) if way not in accepted]):
        if other := _best(badness, count, topology, [*avoided, ways[0]], 1):
            choice = other
            avoided.append(ways[0])
        else:
            accepted.add(ways[0])
    if avoided and (other := _best(badness, count, topology, avoided, TRIED)):
        choice = other if accepted.issuperset(topology.bad_ways(other.nodes)) else choice
    return choice and replace(choice, bad_ways=tuple(topology.bad_ways(choice.nodes)))


def _best(
    badness: Mapping[str, float], count: int, topology: Topology, avoided: Sequence[tuple[str, str]], tried: int
) -> Choice | None:
    """The best choice with one end at most of each way that is to be ``avoided``, among nodes that are connected.

    Of the sets of leaves without which enough nodes are left, so many that have one are ``tried``.
    """
    on = Counter(topology.leaf.get(name, "") for name in badness)
    sets = islice(_covers(avoided), LOOKED_AT)
    enough = (without for without in sets if on.total() - sum(on[leaf] for leaf in without) >= count)
    found = islice(filter(None, (_best_without(badness, count, topology, without) for without in enough)), tried)
    return min(found, key=lambda one: (*_order_of(one, badness, topology), one.nodes), default=None)


def _best_without(
    badness: Mapping[str, float], count: int, topology: Topology, without: frozenset[str]
) -> Choice | None:
    left = {name: bad for name, bad in badness.items() if topology.leaf.get(name) not in without}
    trees = [{name: left[name] for name in names} for names in _connected(left, topology)]
    found = filter(None, (_nearest_best(names, count, topology) for names in trees))
    return min(found, key=lambda one: (*_order_of(one, badness, topology), one.nodes), default=None)


def _covers(ways: Sequence[tuple[str, str]]) -> Iterator[frozenset[str]]:
    """Sets of leaves that have an end of each of ``ways``; first those with the leaves that have most of them."""
    if not ways:
        yield frozenset()
        return
    often = Counter(leaf for way in ways for leaf in way)
    for leaf in sorted(ways[0], key=lambda leaf: (-often[leaf], leaf)):
        for rest in _covers([way for way in ways if leaf not in way]):
            yield rest | {leaf}


def _connected(names: Iterable[str], topology: Topology) -> list[list[str]]:
    """The nodes below each highest switch, with those of which none is known: these may be anywhere."""
    below: dict[str, list[str]] = {}
    anywhere = []
    for name in names:
        if top := topology.top(name):
            below.setdefault(top, []).append(name)
        else:
            anywhere.append(name)
    return [[*found, *anywhere] for found in below.values()] or [anywhere]


def _order_of(choice: Choice, badness: Mapping[str, float], topology: Topology) -> tuple[float, bool, float]:
    height = topology.height(choice.switch) if choice.switch else math.inf
    return sum(badness[name] for name in choice.nodes), not choice.domain, height


def _nearest_best(badness: Mapping[str, float], count: int, topology: Topology) -> Choice | None:
    if not 0 < count <= len(badness):
        return None
    places = [(0, domain, names) for domain, names in _domains(topology).items()]
    places += [(topology.height(switch), switch, names) for switch, names in topology.nodes.items()]
    groups: list[tuple[float, int, int, str, list[str]]] = []
    for height, place, below in places:
        if len(names := [name for name in below if name in badness]) >= count:
            groups.append((_least(badness, names, count), height, len(names), place, names))
    if not groups or badness.keys() - topology.leaf.keys():
        everything = max((height for _, height, *_ in groups), default=0) + 1
        groups.append((_least(badness, badness, count), everything, len(badness), "", list(badness)))
    chosen = sorted(_nearest(badness, min(groups)[-1], count, topology))
    shared = {topology.domain.get(name, "") for name in chosen}
    return Choice(tuple(chosen), _above(chosen, topology), shared.pop() if len(shared) == 1 else "")


def _domains(topology: Topology) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for name, domain in topology.domain.items():
        found.setdefault(domain, set()).add(name)
    return {domain: frozenset(names) for domain, names in found.items()}


def _above(chosen: Sequence[str], topology: Topology) -> str:
    return next((one for one in topology.switches(chosen[0]) if topology.nodes[one].issuperset(chosen)), "")


def _least(badness: Mapping[str, float], names: Iterable[str], count: int) -> float:
    return sum(sorted(badness[name] for name in names)[:count])


def _nearest(badness: Mapping[str, float], names: Collection[str], count: int, topology: Topology) -> list[str]:
    """Of the best nodes those in the fullest NVLink domains, or on the fullest leaves."""
    places = {**topology.leaf, **topology.domain}
    limit = sorted(badness[name] for name in names)[count - 1]
    chosen = [name for name in names if badness[name] < limit]
    free: dict[str, list[str]] = {}
    for name in sorted(names):
        if badness[name] == limit:
            free.setdefault(places.get(name, ""), []).append(name)
    used = {places.get(name, "") for name in chosen}
    while len(chosen) < count:
        left = count - len(chosen)
        best = min(free, key=lambda place: _order(place in used, len(free[place]), left, place))
        chosen += free.pop(best)[:left]
    return chosen


def _order(used: bool, free: int, left: int, place: str) -> tuple[bool, bool, int, str]:
    """Places in use come first, then of those that have all that is left the smallest, then the largest."""
    enough = free >= left
    return not used, not enough, free if enough else -free, place
