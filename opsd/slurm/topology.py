"""The switches and NVLink domains of a cluster, as Slurm's topology plugins describe them. Pure.

The launcher, the choice of nodes, preflight and the simulator all go by this model. What is not described is unknown:
it is nowhere taken for near.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Final

from opsd.slurm.hostlist import HostlistError, compress, expand

_PAIR: Final = re.compile(r'([A-Za-z]+)\s*=\s*(?:"([^"]*)"|([^\s="]+)(?!\S*\s*=))')
"""A value may be quoted; what stands before another sign of equality is the next name, after an empty value."""
_CONTINUED: Final = re.compile(r"\\[ \t]*\r?\n")
"""A line that the next one continues, as in all files of Slurm (``_strip_continuation`` in its parse_config.c)."""

_GAP: Final = re.compile(r"[\s,]+")


class TopologyError(Exception):
    """The topology cannot be read; the message says why in one sentence."""


@dataclass(frozen=True)
class Topology:
    """``leaf`` has the leaf switch of each node, ``above`` the switch that each switch hangs from.

    ``domain`` has the NVLink domain of each node that shares one with others: a block of the plugin topology/block, or
    what the driver says. ``bad`` has the ways between two leaf switches, by name, that were bad when last measured, and
    what is to be said of that measurement.
    """

    leaf: Mapping[str, str] = field(default_factory=dict)
    above: Mapping[str, str] = field(default_factory=dict)
    domain: Mapping[str, str] = field(default_factory=dict)
    bad: Mapping[tuple[str, str], str] = field(default_factory=dict)
    blocks: frozenset[str] = frozenset()
    """Those of ``leaf`` that are blocks, which stand for the switch of nodes without any."""

    def switches(self, node: str) -> tuple[str, ...]:
        """The switches above a node, its leaf first; none for a node that the topology lacks."""
        return self._path(self.leaf.get(node))

    def top(self, node: str) -> str:
        """The highest switch above a node; "" if none is known, as above a block."""
        path = self.switches(node)
        return path[-1] if path and path[0] not in self.blocks else ""

    def apart(self, one: str, other: str) -> bool:
        """Whether it is known that no switch connects two nodes."""
        tops = {self.top(one), self.top(other)}
        return len(tops) == 2 and "" not in tops

    def _path(self, switch: str | None) -> tuple[str, ...]:
        path: list[str] = []
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

    def place(self, node: str) -> str | None:
        """Its NVLink domain, where the cluster has any, otherwise its leaf switch; None if that is not known."""
        return (self.domain or self.leaf).get(node)

    def hops(self, one: str, other: str) -> int | None:
        """The switches that a message between two nodes passes; None if no path is known."""
        return _between(self.switches(one), self.switches(other))

    def mean_hops(self, node: str, others: Collection[str]) -> float | None:
        """Over the ways from a node to ``others``; None if one of them is not known, or there are no others."""
        up, leaves = self.switches(node), Counter(self.leaf.get(other) for other in others if other != node)
        ways = {leaf: _between(up, self._path(leaf)) for leaf in leaves}
        known = [way * leaves[leaf] for leaf, way in ways.items() if way is not None]
        return sum(known) / leaves.total() if known and len(known) == len(ways) else None

    def with_domains(self, told: Mapping[str, str]) -> Topology:
        """With the NVLink domain of each node that its driver tells, in place of the block that Slurm has for it.

        A block whose nodes all tell the same domain is another name of it, also for its nodes that tell nothing.
        """
        domains: dict[str, set[str]] = {}
        for node in told.keys() & self.domain.keys():
            domains.setdefault(self.domain[node], set()).add(told[node])
        names = {block: found.pop() for block, found in domains.items() if len(found) == 1}
        blocks = {node: names.get(block, block) for node, block in self.domain.items()}
        return replace(self, domain={**blocks, **told})

    def joined(self, other: Topology) -> Topology:
        """With what ``other``, a second topology of the same cluster, knows of nodes beside this one.

        A switch or domain of the same name is the same one if both have a node in common below it; otherwise the one of
        ``other`` gets another name here.
        """
        mine, theirs = (
            {*one.nodes, *one.above, *one.above.values(), *one.domain.values(), *one.blocks} for one in (self, other)
        )
        named: dict[str, str] = {}
        for name in sorted(theirs):
            new = name
            while new in (mine if self._below(name).isdisjoint(other._below(name)) else ()) or new in named.values():
                new += "_other"
            named[name] = new
        domain = {node: named[name] for node, name in other.domain.items()} | dict(self.domain)
        leaf = {node: named[name] for node, name in other._switched().items()} | self._switched()
        above = {named[one]: named[up] for one, up in other.above.items()}
        blocks = self.blocks | {named[name] for name in other.blocks}
        return Topology({**domain, **leaf}, {**above, **self.above}, domain, self.bad, blocks)

    @property
    def has_switches(self) -> bool:
        """Whether it has more than blocks."""
        return not self.blocks.issuperset(self.leaf.values())

    def contradiction(self, other: Topology) -> str:
        """Two nodes that are below one leaf switch here and two in ``other``, or the reverse; "" if there are none."""
        first: dict[tuple[str, bool], str] = {}
        for node in sorted(self.leaf.keys() & other.leaf.keys()):
            for own in (True, False):
                one, two = (self, other) if own else (other, self)
                before = first.setdefault((one.leaf[node], own), node)
                if two.leaf[before] != two.leaf[node]:
                    here, there = ("in Slurm's", "in the file") if own else ("in the file", "in Slurm's")
                    return f"{before} and {node} are below one leaf switch {here} and below two {there}"
        return ""

    def _below(self, name: str) -> frozenset[str]:
        """The nodes below a switch, or in a domain, of this name."""
        return self.nodes.get(name, frozenset()) | {node for node, domain in self.domain.items() if domain == name}

    def _switched(self) -> dict[str, str]:
        """The leaf switch of each node that has one, and no block in its place."""
        return {node: name for node, name in self.leaf.items() if self.domain.get(node) != name}

    def swap_hops(self, nodes: Collection[str], old: str, new: str) -> tuple[float, float] | None:
        """Mean hops to the rest of ``nodes``, of ``old`` and of ``new`` in its place; None if they are not known."""
        rest = [node for node in nodes if node not in (old, new)]
        before, after = self.mean_hops(old, rest), self.mean_hops(new, rest)
        return None if before is None or after is None else (before, after)

    def swap_text(self, nodes: Collection[str], old: str, new: str) -> str:
        """What it costs in hops and in NVLink that ``new`` takes the place of ``old``, "" if that is not known."""
        told = []
        if hops := self.swap_hops(nodes, old, new):
            before, after = hops
            same = f"{new} is as near to the others as {old}: {after:.1f} hops"
            told.append(
                same if after == before else f"{new} is {after:.1f} hops from the others, {old} was {before:.1f}"
            )
        tops = {self.top(node) for node in nodes if node not in (old, new)} - {""}
        if tops and (top := self.top(new)) and top not in tops:
            told.append(f"{new} is below {top}, which is not connected with the others")
        if old in self.domain and self.domain.get(new) != self.domain[old]:
            told.append(f"{new} is not in the NVLink domain {self.domain[old]}")
        told += map(self.bad_text, self.bad_from(new, [node for node in nodes if node not in (old, new)]))
        return ", ".join(told)

    def bad_ways(self, nodes: Iterable[str]) -> list[tuple[str, str]]:
        """The ways between the leaf switches of ``nodes`` that were bad when last measured."""
        leaves = {self.leaf.get(node) for node in nodes} if self.bad else set()
        return sorted(pair for pair in self.bad if leaves.issuperset(pair))

    def bad_from(self, node: str, others: Iterable[str]) -> list[tuple[str, str]]:
        """Those of them from the leaf switch of ``node`` to those of ``others``."""
        return [pair for pair in self.bad_ways([node, *others]) if self.leaf.get(node) in pair]

    def bad_towards(self, nodes: Iterable[str]) -> Counter[str]:
        """How many of these ways each leaf switch has to those of ``nodes``."""
        leaves = {self.leaf.get(node) for node in nodes} if self.bad else set()
        ends = [pair for pair in self.bad if leaves.intersection(pair)]
        return Counter(leaf for pair in ends for leaf, other in (pair, pair[::-1]) if other in leaves)

    def bad_text(self, pair: tuple[str, str]) -> str:
        """What is known of a bad way."""
        return f"the way between {pair[0]} and {pair[1]} was bad when last measured ({self.bad[pair]})"

    def cost(self, node: str, peers: Collection[str]) -> tuple[int, float]:
        """What ``node`` costs beside ``peers``: how many of them are in other places, and the mean hops to them."""
        place, hops = self.place(node), self.mean_hops(node, peers)
        apart = sum(place is None or self.place(peer) != place for peer in peers)
        return apart, math.inf if hops is None else hops

    def split_groups(self, nodes: Sequence[str], size: int) -> list[tuple[str, ...]]:
        """Of the groups of ``size`` consecutive ``nodes`` those that span places; unknown ones are left out."""
        groups = [tuple(nodes[at : at + size]) for at in range(0, len(nodes), size)] if size > 1 else []
        return [group for group in groups if len({self.place(node) for node in group} - {None}) > 1]

    def arranged(self, nodes: Sequence[str], size: int) -> list[str]:
        """``nodes`` with whole groups of ``size`` in one place first, in their order; then those that are left over."""
        places: dict[str | None, list[str]] = {}
        for node in nodes:
            places.setdefault(self.place(node), []).append(node)
        whole = {place: len(names) // size * size for place, names in places.items()}
        first = [name for place, names in places.items() for name in names[: whole[place]]]
        return first + [name for place, names in places.items() for name in names[whole[place] :]]

    def leaf_pairs(self, nodes: Iterable[str]) -> list[tuple[str, str]]:
        """Every pair of the leaf switches above ``nodes``, by name, but those that are known not to be connected."""
        top = {self.leaf[node]: self.top(node) for node in nodes if node in self.leaf}
        return [pair for pair in combinations(sorted(top), 2) if len({top[leaf] for leaf in pair} - {""}) < 2]


def _between(up: Sequence[str], down: Sequence[str]) -> int | None:
    return next((up.index(switch) + down.index(switch) + 1 for switch in up if switch in down), None)


def even(nodes: Sequence[str], per_leaf: int) -> Topology:
    """A made-up tree: ``per_leaf`` nodes below each leaf switch, one switch above all leaves."""
    leaf = {node: f"leaf-{index // per_leaf:03}" for index, node in enumerate(nodes)}
    return Topology(leaf, dict.fromkeys(leaf.values(), "spine"))


def parse(text: str) -> Topology:
    """The topology in a ``topology.conf`` of topology/tree or topology/block, or in ``scontrol show topology``.

    A block is an NVLink domain, and its NVLink switches are the one hop between its nodes. The file does not say what
    is between blocks, only which are aggregates (BlockSizes), that is nearer each other; one is as a switch above its
    blocks. Raises TopologyError.
    """
    leaf: dict[str, str] = {}
    above: dict[str, str] = {}
    domain: dict[str, str] = {}
    blocks: list[str] = []
    sizes: list[int] = []
    aggregates: list[tuple[str, ...]] = []
    try:
        for line in _CONTINUED.sub(" ", text).splitlines():
            pairs = _PAIR.findall(line.partition("#")[0])
            told = {key.lower(): quoted or plain for key, quoted, plain in pairs if plain != "(null)"}
            nodes = _listed(told, "nodes")
            sizes += [int(size) for size in _listed(told, "blocksizes") if size.isdecimal() and len(size) < 10]
            if block := told.get("blockname"):
                blocks.append(block)
                domain.update(dict.fromkeys(nodes, block))
            elif aggregate := told.get("aggregatedblock"):
                aggregates.append(expand(aggregate))
            elif switch := told.get("switchname"):
                above.update(dict.fromkeys(_listed(told, "switches"), switch))
                if told.get("level", "0") == "0":  # scontrol names all nodes below a switch, at every level
                    leaf.update(dict.fromkeys(nodes, switch))
    except HostlistError as error:
        raise TopologyError(f"the topology cannot be read: {error}") from error
    for size in sorted(size for size in sizes if 0 < sizes[0] < size):
        count = size // sizes[0]
        aggregates += [tuple(blocks[at : at + count]) for at in range(0, len(blocks), count)]
    return Topology(domain | leaf, {**_above_blocks(aggregates), **above}, domain, blocks=frozenset(blocks))


def _above_blocks(aggregates: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """The parent of each block and each smaller aggregate."""
    above: dict[str, str] = {}
    top: dict[str, str] = {}
    for blocks in sorted(aggregates, key=len):
        name = compress(blocks)
        above |= {top.get(block, block): name for block in blocks if top.get(block, block) != name}
        top |= dict.fromkeys(blocks, name)
    return above


def _listed(told: Mapping[str, str], key: str) -> tuple[str, ...]:
    """The names of a list, in which Slurm passes over blanks and commas without a name."""
    return expand(_GAP.sub(",", told.get(key, "")).strip(","))


def text(topology: Topology) -> str:
    """The switches of ``topology`` as a ``topology.conf`` of topology/tree."""
    nodes: dict[str, list[str]] = {}
    for node, leaf in topology.leaf.items():
        nodes.setdefault(leaf, []).append(node)
    switches: dict[str, list[str]] = {}
    for switch, up in topology.above.items():
        switches.setdefault(up, []).append(switch)
    lines = [f"SwitchName={leaf} Nodes={compress(names)}" for leaf, names in nodes.items()]
    return "\n".join([*lines, *(f"SwitchName={up} Switches={','.join(below)}" for up, below in switches.items()), ""])
