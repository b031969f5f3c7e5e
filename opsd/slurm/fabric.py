"""The switch tree of an InfiniBand fabric, from what ``ibnetdiscover`` (infiniband-diags) prints. Pure.

Each switch and adapter is a block: a line with its type, id and description, then a line for each port with a link.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from opsd.slurm.topology import Topology, TopologyError

_HEAD: Final = re.compile(r'(?:Switch|Ca|Rt)\s+\d+\s+"([SHR]-\w+)"\s*#\s*"([^"]*)"')
_LINK: Final = re.compile(r'\[\d+\](?:\[ext \d+\])?(?:\(\w+\))?\s+"([SHR]-\w+)"[^#]*#[^"]*"([^"]*)"')
_ADAPTER: Final = re.compile(r"([A-Za-z0-9][\w.-]*)\s+(?:HCA-?\d+|(?:mlx|hfi|qib|mthca|ib|rdma)\S*)", re.ASCII)
"""``node01 HCA-1``, ``node01 mlx5_0``, as rdma-ndd or a driver sets it; firmware has ``MT4129 ConnectX7 …``."""
_MANAGED: Final = re.compile(r"MF0;(.+?):[^:]*")
"""What the management of a switch sets: ``MF0;NAME:MODEL/UNIT``."""
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_.-]")
LONGEST: Final = 60
"""Letters of a name."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """``links`` has the neighbours of each switch and adapter, ``described`` their descriptions, both by their ids."""

    links: Mapping[str, AbstractSet[str]]
    described: Mapping[str, str]

    def adapters(self, names: Collection[str] = ()) -> dict[str, str]:
        """The node of each adapter that has one: of ``names``, or without these every name that looks like one.

        Only one of the two may have the domain of the host, too.
        """
        full = {name.lower(): name for name in names}
        hosts = [name.partition(".")[0] for name in full]
        often = Counter(hosts)
        short = {host: name for host, name in zip(hosts, full.values(), strict=True) if often[host] == 1}
        found: dict[str, str] = {}
        for adapter, described in self.described.items():
            first = described.split(" ", 1)[0].lower()
            if name := full.get(first) or full.get(first.partition(".")[0]) or short.get(first):
                found[adapter] = name
            elif not full and adapter[0] == "H" and (match := _ADAPTER.fullmatch(described)):
                found[adapter] = match[1]
        return {adapter: name for adapter, name in found.items() if adapter[0] == "H"}

    def others(self, names: Collection[str] = ()) -> tuple[list[str], list[str]]:
        """The hosts that are none of ``names``, and what adapters are called that bear no name of a host.

        Those within switches (SHARP) are left out.
        """
        named = self.adapters(names)
        texts = [text for one, text in self.described.items() if one[0] == "H" and one not in named]
        hosts = {match[1] for text in texts if (match := _ADAPTER.fullmatch(text))}
        return sorted(hosts), [text for text in texts if not _ADAPTER.fullmatch(text) and "Aggregation" not in text]


def parse(text: str) -> Fabric:
    """The fabric in one or several outputs of ``ibnetdiscover``. Raises TopologyError."""
    links: dict[str, set[str]] = {}
    described: dict[str, str] = {}
    blocks: set[str] = set()
    here = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            here = head[1]
            blocks.add(here)
            described[here] = head[2].strip()
            links.setdefault(here, set())
        elif here and (link := _LINK.match(line)):
            described.setdefault(link[1], link[2].strip())
            links[here].add(link[1])
            links.setdefault(link[1], set()).add(here)
    if not any(one[0] == "S" for one in links):
        raise TopologyError("there is no switch in it, so it is not what ibnetdiscover prints without options")
    if absent := links.keys() - blocks:
        raise TopologyError(f"it is cut short: {min(absent)} is linked to another and has no block of its own")
    return Fabric(links, described)


@dataclass(frozen=True, slots=True)
class _Place:
    """A switch of the tree, which may stand for several ``switches`` of the fabric at one level."""

    name: str
    switches: frozenset[str]


def tree(fabric: Fabric, names: Collection[str] = ()) -> Topology:
    """The tree above the nodes, those of ``names`` if any are given.

    A node with adapters on several switches (rails) is below all of them together, beside those on the same ones. A few
    nodes may lack some switches, because a port is down. They belong to the many nodes that have all. A few may have
    more switches (a login node on two leaves), or mostly the same (one cable in a wrong switch, storage on another).
    They belong to the largest such group, and join no others. Above, switches that join the same places are one, as the
    spines of a
    fat tree are.
    """
    on: dict[str, frozenset[str]] = {}
    for adapter, name in fabric.adapters(names).items():
        on[name] = on.get(name, frozenset()) | {peer for peer in fabric.links[adapter] if peer[0] == "S"}
    below = _places(fabric, on)
    names_of = _Names(fabric)
    places = [_Place(names_of(switches), switches) for switches in below]
    leaf = {name: place.name for place in places for name in sorted(below[place.switches])}
    return Topology(leaf, _levels(fabric, places, names_of))


def _places(fabric: Fabric, on: Mapping[str, frozenset[str]]) -> dict[frozenset[str], list[str]]:
    """The nodes of each place, by its switches; the place of most switches first, then by name.

    Nodes whose switches only they connect are no exception to a place, or it would be cut off from what they reach.
    """
    same: dict[frozenset[str], list[str]] = {}
    for name in sorted(on):
        if on[name]:
            same.setdefault(on[name], []).append(name)
    part = _parts(fabric)
    below: dict[frozenset[str], list[str]] = {}
    at: dict[str, list[frozenset[str]]] = {}
    for switches, those in sorted(same.items(), key=lambda one: (-len(one[1]), -len(one[0]), one[1])):
        linked = len({part[one] for one in switches}) == 1
        met = dict.fromkeys(place for one in sorted(switches) for place in at.get(one, ()))
        beside = [place for place in met if place >= switches or (linked and _mostly_same(place, switches))]
        place = max(beside, key=lambda place: len(below[place]), default=switches)
        if place is switches:
            for one in switches:
                at.setdefault(one, []).append(switches)
        below.setdefault(place, []).extend(those)
    return dict(sorted(below.items(), key=lambda one: (-len(one[0]), min(one[1]))))


def _mostly_same(place: frozenset[str], switches: frozenset[str]) -> bool:
    return place <= switches or 2 * len(place & switches) > len(place | switches)


def _parts(fabric: Fabric) -> dict[str, str]:
    """One switch of all that are linked with each switch, by way of switches alone."""
    part: dict[str, str] = {}
    for first in fabric.links:
        waiting = [first] if first[0] == "S" and first not in part else []
        while waiting:
            one = waiting.pop()
            if one not in part:
                part[one] = first
                waiting += (peer for peer in fabric.links[one] if peer[0] == "S")
    return part


def _levels(fabric: Fabric, places: Sequence[_Place], names_of: _Names) -> dict[str, str]:
    """What each of ``places`` hangs from, and what that hangs from, up to one above all that are connected."""
    above: dict[str, str] = {}
    seen = _all(place.switches for place in places)
    while len(places) > 1:
        higher = [_upwards(fabric, place, seen) for place in places]
        groups = _joined(fabric, places, higher)
        if len(groups) == len(places) and not any(higher):
            break
        found = []
        for group in groups:
            reached = _all(higher[at] for at in group)
            if len(group) == 1 and not reached:
                found.append(places[group[0]])
                continue
            switches = reached or _all(places[at].switches for at in group)
            found.append(_Place(names_of(switches), switches))
            above.update((places[at].name, found[-1].name) for at in group)
        places, seen = found, seen | _all(higher)
    return above


def _all(sets: Iterable[AbstractSet[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _upwards(fabric: Fabric, place: _Place, seen: AbstractSet[str]) -> frozenset[str]:
    """The switches next to those of ``place`` that no level below has."""
    return frozenset(peer for one in place.switches for peer in fabric.links[one] if peer[0] == "S") - seen


def _joined(fabric: Fabric, places: Sequence[_Place], higher: Sequence[frozenset[str]]) -> list[list[int]]:
    """The places, by number, in groups that have a switch in common, or are linked to the same one or to each other."""
    group = list(range(len(places)))

    def root(at: int) -> int:
        while group[at] != at:
            at = group[at]
        return at

    holders: dict[str, int] = {}
    for at, place in enumerate(places):
        for switch in place.switches | higher[at]:
            group[root(at)] = root(holders.setdefault(switch, at))
    for at, place in enumerate(places):
        for switch in _all(fabric.links[one] for one in place.switches) & holders.keys():
            group[root(at)] = root(holders[switch])
    found: dict[int, list[int]] = {}
    for at in range(len(places)):
        found.setdefault(root(at), []).append(at)
    return list(found.values())


class _Names:
    """Names for places, each once: of one switch what it is called, if no other is, otherwise its id.

    None is longer than Slurm takes (HOST_NAME_MAX), with some room for what makes equal ones different.
    """

    def __init__(self, fabric: Fabric) -> None:
        called = {one: _called(text) for one, text in fabric.described.items() if one[0] == "S"}
        often = Counter(called.values())
        self._switches = {
            one: name if name and often[name] == 1 else f"{name or 'switch'}-{one[2:]}" for one, name in called.items()
        }
        self._used: set[str] = set()

    def __call__(self, switches: frozenset[str]) -> str:
        first = min(switches, key=lambda one: _natural(self._switches[one]))
        more = f"_and_{len(switches) - 1}_more" if len(switches) > 1 else ""
        name = self._switches[first] + more
        if len(name) > LONGEST:
            name = f"switch-{first[2:]}"[: LONGEST - len(more)] + more
        while name in self._used:
            name += "_"
        self._used.add(name)
        return name


def _called(described: str) -> str:
    """The name in the description of a switch, "" if it has only what the firmware says."""
    managed = _MANAGED.fullmatch(described)
    name = managed[1] if managed else described
    return "" if "Mellanox" in name or "Technologies" in name else _NO_NAME.sub("_", name).strip("_")


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which switch10 comes after switch9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d{1,18})", name)]
