"""The switches between the nodes from Slurm's ``topology.conf``: how far apart nodes are, and which to pick.

Pure but for ``read``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from opsd.slurm.hostlist import HostlistError, expand

_LINE: Final = re.compile(r"^\s*SwitchName=(\S+)(.*)$", re.IGNORECASE | re.MULTILINE)
_BELOW: Final = re.compile(r"\s(Nodes|Switches)=(\S+)", re.IGNORECASE)


class TopologyError(Exception):
    """The topology cannot be read; the message says why in one sentence."""


@dataclass(frozen=True)
class Topology:
    """``leaf`` has the leaf switch of each node, ``above`` the switch that each switch hangs from."""

    leaf: Mapping[str, str] = field(default_factory=dict)
    above: Mapping[str, str] = field(default_factory=dict)

    def switches(self, node: str) -> tuple[str, ...]:
        """The switches above a node, its leaf first; none for a node that the topology lacks."""
        path: list[str] = []
        switch = self.leaf.get(node)
        while switch is not None and switch not in path:
            path.append(switch)
            switch = self.above.get(switch)
        return tuple(path)

    @cached_property
    def nodes(self) -> Mapping[str, frozenset[str]]:
        """All nodes below each switch."""
        found: dict[str, set[str]] = {}
        for node in self.leaf:
            for switch in self.switches(node):
                found.setdefault(switch, set()).add(node)
        return {switch: frozenset(names) for switch, names in found.items()}

    def height(self, switch: str) -> int:
        """1 for a leaf switch, 2 for one above leaves, and so on."""
        return max(self.switches(node).index(switch) for node in self.nodes[switch]) + 1

    def hops(self, one: str, other: str) -> int | None:
        """The switches that a message between two nodes passes; None if no path is known."""
        up, down = self.switches(one), self.switches(other)
        return next((up.index(switch) + down.index(switch) + 1 for switch in up if switch in down), None)

    def mean_hops(self, node: str, others: Collection[str]) -> float | None:
        """Over the ways from a node to ``others``; None if one of them is not known, or there are no others."""
        ways = [self.hops(node, other) for other in others if other != node]
        known = [way for way in ways if way is not None]
        return sum(known) / len(known) if known and len(known) == len(ways) else None

    def swap_text(self, nodes: Collection[str], old: str, new: str) -> str:
        """What it costs in hops that ``new`` takes the place of ``old`` among ``nodes``, "" if that is not known."""
        rest = [node for node in nodes if node not in (old, new)]
        before, after = self.mean_hops(old, rest), self.mean_hops(new, rest)
        if before is None or after is None:
            return ""
        if after == before:
            return f"{new} is as near to the others as {old}: {after:.1f} hops"
        return f"{new} is {after:.1f} hops from the others, {old} was {before:.1f}"


def parse(text: str) -> Topology:
    """The topology in a ``topology.conf`` of the plugin topology/tree. Raises TopologyError."""
    plain = "\n".join(line.partition("#")[0] for line in text.splitlines())
    leaf: dict[str, str] = {}
    above: dict[str, str] = {}
    try:
        for switch, rest in _LINE.findall(plain):
            for what, names in _BELOW.findall(rest):
                below = leaf if what.lower() == "nodes" else above
                below.update((name, switch) for name in expand(names))
    except HostlistError as error:
        raise TopologyError(f"the topology cannot be read: {error}") from error
    return Topology(leaf, above)


def read(path: Path | None = None) -> Topology:
    """The topology in ``path``, or at Slurm's default location; an empty one if there is no such file.

    Raises TopologyError if the given file cannot be read.
    """
    default = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).with_name("topology.conf")
    try:
        return parse((path or default).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        if path is None:
            return Topology()
        raise TopologyError(f"{path} cannot be read: {error.strerror}") from error


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
