"""Finds the bad node, link or switch of a cluster with few group tests: pure, it yields tests and takes answers.

In a group test every pair of a group exchanges data, and the slowest pair's bandwidth counts. The test fails if the
group contains a bad node, or both ends of a bad link. Which pair was slowest cannot be trusted: a node that is late
makes its next partners late. A hang tells nothing at all. So the search has six steps.

1. Screen about sqrt(N) groups side by side. None is left out. A switch splits none, if that can be avoided.
2. Bisect the failing groups side by side. A single node gets a known-good partner.
3. Confirm each suspect against two other known-good partners. A third one decides.
4. If both halves of a failing group pass, the fault lies between them. Grow one half into the other to find the pair.
5. Test all that are left together. What fails only there lies between groups, and is found in the same way.
6. If the topology is known, tell a link from a path between two switches, a switch's uplink and a whole switch.

The method is that of NVIDIA's cluster-readiness tests, with trusted partners as in DLRover. Thresholds are relative to
what the healthy groups reach in the same run. They are one-sided, as in Anubis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final, Literal, NamedTuple, TypeVar

from opsd.preflight.judge import nearest_rank

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupTest:
    """A group of nodes to test together, and the purpose."""

    members: tuple[str, ...]
    purpose: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Bandwidth of the slowest pair in bytes per second, one value per iteration; none if the test did not finish."""

    samples: tuple[float, ...]


Search = Generator[Sequence[GroupTest], Sequence[Answer], T]
"""Yields tests that may run in parallel if they share no node, receives their answers."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A test fails below these shares of the healthy level, in its median or in its tail (flaky nodes).

    ``floor`` is an additional absolute bound in bytes per second.
    """

    median: float = 0.85
    tail: float = 0.80
    floor: float = 0.0


class Level(NamedTuple):
    """The result of a test in bytes per second: the median of its iterations, and what all but a tenth exceed."""

    median: float
    tail: float


def level(answer: Answer) -> Level | None:
    """The level that a test reached, None if it did not finish. A single outlier in ten iterations has no effect."""
    if not answer.samples:
        return None
    return Level(median(answer.samples), sorted(answer.samples)[len(answer.samples) // 10])


@dataclass(slots=True)
class Baseline:
    """What healthy groups reach, by group size, and how far a test may be below it."""

    tolerance: Tolerance
    healthy: dict[int, Level] = field(default_factory=dict)

    def learn(self, size: int, answers: Sequence[Answer], share: float = 0.75) -> None:
        """Use the upper quartile (or another ``share``) of ``answers``: right if a quarter of the groups is healthy."""
        levels = [found for answer in answers if (found := level(answer)) is not None]
        if levels:
            medians, tails = zip(*levels, strict=True)
            self.healthy[size] = Level(nearest_rank(medians, share), nearest_rank(tails, share))

    def passes(self, size: int, answer: Answer) -> bool:
        """Whether a test of ``size`` nodes finished and no pair was slow, neither always nor sometimes."""
        found = level(answer)
        if found is None:
            return False
        expected = self.expected(size) or Level(0.0, 0.0)
        # Where healthy groups scatter widely, a median within their scatter is no sign of a fault.
        bound = min(self.tolerance.median * expected.median, expected.tail)
        return found.median >= max(bound, self.tolerance.floor) and found.tail >= self.tolerance.tail * expected.tail

    def expected(self, size: int) -> Level | None:
        """What a healthy group of ``size`` reaches: interpolated in log(size) between the measured sizes."""
        known = sorted(self.healthy.items())
        for (small, fast), (large, slow) in pairwise(known):
            if small <= size <= large:
                weight = math.log(size / small) / math.log(large / small)
                return Level(*(a + (b - a) * weight for a, b in zip(fast, slow, strict=True)))
        if not known:
            return None
        return known[0][1] if size < known[0][0] else known[-1][1]


def disjoint(tests: Sequence[GroupTest]) -> list[list[int]]:
    """Indexes of ``tests`` packed into rounds in which each node is used once at most."""
    rounds: list[tuple[set[str], list[int]]] = []
    for index, test in enumerate(tests):
        for busy, indexes in rounds:
            if busy.isdisjoint(test.members):
                busy.update(test.members)
                indexes.append(index)
                break
        else:
            rounds.append(({*test.members}, [index]))
    return [indexes for _, indexes in rounds]


def side_by_side(searches: Sequence[Search[T]]) -> Search[list[T]]:
    """Run several searches at once, merging their requests; their results, in order."""
    results: dict[int, T] = {}
    wanted: dict[int, Sequence[GroupTest]] = {}

    def advance(index: int, answers: Sequence[Answer] | None) -> None:
        try:
            wanted[index] = searches[index].send(answers) if answers is not None else next(searches[index])
        except StopIteration as end:
            wanted.pop(index, None)
            results[index] = end.value

    for index in range(len(searches)):
        advance(index, None)
    while wanted:
        asked = [*wanted.items()]
        answers = [*(yield [test for _, tests in asked for test in tests])]
        for index, tests in asked:
            mine, answers = answers[: len(tests)], answers[len(tests) :]
            advance(index, mine)
    return [results[index] for index in range(len(searches))]


def partition(nodes: Sequence[str], switch_of: Mapping[str, str]) -> list[tuple[str, ...]]:
    """About sqrt(N) groups of two or more that contain every node once; a group spans only small switches.

    Without a topology the groups follow the order of ``nodes``, as neighbours in a host list mostly share a switch.
    """
    size = max(2, round(math.sqrt(len(nodes))))
    switches: dict[str, list[str]] = {}
    for node in nodes:
        switches.setdefault(switch_of.get(node, ""), []).append(node)
    chunks = [chunk for members in switches.values() for chunk in _even_chunks(members, size)]
    groups: list[tuple[str, ...]] = []
    for chunk in chunks:
        small = min(len(chunk), len(groups[-1])) < 2 if groups else False
        if groups and (small or len(groups[-1]) + len(chunk) <= size * 5 // 4):
            groups[-1] += chunk
        else:
            groups.append(chunk)
    # A single group has nothing to be compared with.
    return groups if len(groups) > 1 or len(nodes) < 4 or not switch_of else partition(nodes, {})


def _even_chunks(members: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """``members`` in order, in chunks whose sizes differ by one at most: ``size`` to one and a half times that."""
    count = max(1, round(len(members) / size))
    cuts = [round(index * len(members) / count) for index in range(count + 1)]
    return [tuple(members[low:high]) for low, high in pairwise(cuts)]


def halves(group: Sequence[str], switch_of: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``group`` in two parts, split between two switches as near to the middle as possible if it spans several."""
    borders = [i for i in range(1, len(group)) if switch_of.get(group[i]) != switch_of.get(group[i - 1])]
    middle = min(borders or [(len(group) + 1) // 2], key=lambda cut: abs(2 * cut - len(group)))
    return tuple(group[:middle]), tuple(group[middle:])


Kind = Literal["node", "link", "path", "uplink", "switch", "group", "passing", "everything"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One test of the search: what it ``found``, None if it did not finish, and the value of a healthy group."""

    round: int
    purpose: str
    members: tuple[str, ...]
    passed: bool
    found: Level | None
    expected: Level | None


@dataclass(frozen=True, slots=True)
class Culprit:
    """A faulty part. ``parts`` are the node, the two nodes of a link, the switch or switches, or the nodes of a group.

    ``passing`` is a fault somewhere in a group that did not recur.
    """

    kind: Kind
    parts: tuple[str, ...]

    def __str__(self) -> str:
        match self.kind:
            case "node":
                return f"node {self.parts[0]}"
            case "link":
                return f"the link between {self.parts[0]} and {self.parts[1]}"
            case "path":
                return f"the path between switch {self.parts[0]} and switch {self.parts[1]}"
            case "uplink":
                return f"the uplink of switch {self.parts[0]}"
            case "switch":
                return f"switch {self.parts[0]}"
            case "group":
                return f"something that {', '.join(self.parts)} share: a switch, a power supply"
            case "passing":
                return f"something between {', '.join(self.parts)} that comes and goes"
        return "everything"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``suspected`` failed once and passed when tested again. The search used ``tests`` in ``rounds``."""

    culprits: tuple[Culprit, ...]
    suspected: tuple[str, ...]
    tests: int
    rounds: int
    evidence: tuple[Evidence, ...]

    @property
    def clean(self) -> bool:
        """Whether there is no culprit and no test failed, not even once."""
        return not self.culprits and not self.suspected and all(entry.passed for entry in self.evidence)


_SAMPLES: Final = 4
_MAX_LINKS: Final = 4
_CONTROLS: Final = 2
_SHARED: Final = 3
"""A switch is named instead of its bad nodes if it has at least this many and all are bad."""


def find(
    nodes: Sequence[str], switch_of: Mapping[str, str] | None = None, tolerance: Tolerance | None = None
) -> Generator[Sequence[GroupTest], Sequence[Answer], Diagnosis]:
    """Search ``nodes``; every yielded list is one round, its tests share no node.

    ``switch_of`` maps nodes to their leaf switches, where that is known. Raises ValueError for fewer than two nodes or
    a node that is named twice.
    """
    if len(nodes) < 2 or len({*nodes}) != len(nodes):
        raise ValueError("a search needs at least two nodes, each named once")
    finder = _Finder(nodes, switch_of or {}, Baseline(tolerance or Tolerance()))
    search = finder.diagnose()
    log: list[tuple[int, GroupTest, Answer]] = []
    rounds = 0
    try:
        wanted = next(search)
        while True:
            answers: dict[int, Answer] = {}
            for indexes in disjoint(wanted):
                given = yield [wanted[index] for index in indexes]
                answers.update(zip(indexes, given, strict=True))
                log += [(rounds, wanted[index], answers[index]) for index in indexes]
                rounds += 1
            wanted = search.send([answers[index] for index in range(len(wanted))])
    except StopIteration as end:
        culprits, suspected = end.value
    evidence = tuple(finder.evidence(number, test, answer) for number, test, answer in log)
    return Diagnosis(culprits, suspected, len(log), rounds, evidence)


@dataclass(slots=True)
class _Finder:
    """The search. ``good`` are nodes of groups that passed, used in turn as partners; ``bad`` are suspects."""

    nodes: Sequence[str]
    switch_of: Mapping[str, str]
    baseline: Baseline
    good: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    turn: int = 0

    def diagnose(self) -> Search[tuple[tuple[Culprit, ...], tuple[str, ...]]]:
        """The whole search: culprits, and nodes that were suspected but not confirmed."""
        if len(self.nodes) == 2:
            return (yield from self.only_pair())
        failing = yield from self.screen()
        if not self.good:
            return (Culprit("everything", ()),), ()
        culprits: list[Culprit] = []
        suspected: list[str] = []
        if failing:
            yield from self.calibrate_pairs()
            found = yield from side_by_side([self.bisect(group) for group in failing])
            self.bad = {part for some in found for c in some if c.kind in ("node", "group") for part in c.parts}
            verdicts = yield from side_by_side([self.confirm(c) for some in found for c in some])
            for culprit, confirmed in verdicts:
                if confirmed:
                    culprits.append(culprit)
                else:
                    suspected += culprit.parts
        culprits += yield from self.between({*self._members(culprits)})
        return tuple(_merged(culprits, self.switch_of)), tuple(dict.fromkeys(suspected))

    def only_pair(self) -> Search[tuple[tuple[Culprit, ...], tuple[str, ...]]]:
        """Whether the only pair exchanges data, two of three tests deciding.

        There is no other pair to compare its speed with, and its own scatter is that of what else the nodes do: only
        the floor of ``tolerance`` counts.
        """
        pair, passed = (self.nodes[0], self.nodes[1]), list[bool]()
        while passed.count(True) < 2 and passed.count(False) < 2:
            (answer,) = yield [GroupTest(pair, "pair")]
            passed.append(self.baseline.passes(2, answer))
        if passed.count(False) == 2:
            return (Culprit("everything", ()),), ()
        return (), () if all(passed) else pair

    def screen(self) -> Search[list[tuple[str, ...]]]:
        """The failing groups. Where none passes, smaller ones are tried, down to pairs."""
        groups = partition(self.nodes, self.switch_of)
        while True:
            answers = yield [GroupTest(group, "screen") for group in groups]
            self.baseline.healthy.clear()
            self.baseline.learn(max(map(len, groups)), answers)
            passed = [self.baseline.passes(len(g), answer) for g, answer in zip(groups, answers, strict=True)]
            if any(passed) or max(map(len, groups)) <= 3:
                break
            groups = [half for group in groups for half in (halves(group, {}) if len(group) > 3 else (group,))]
        self.good = [node for group, ok in zip(groups, passed, strict=True) if ok for node in group]
        return [group for group, ok in zip(groups, passed, strict=True) if not ok]

    def calibrate_pairs(self) -> Search[None]:
        """Measure what a healthy pair reaches: the slowest of few pairs is faster than the slowest of many."""
        spread = self.good[:: max(1, len(self.good) // (2 * _CONTROLS))]
        pairs = [*zip(spread[0::2], spread[1::2], strict=False)][:_CONTROLS]
        answers = yield [GroupTest(pair, "control") for pair in pairs]
        self.baseline.learn(2, answers, share=1.0)

    def bisect(self, group: Sequence[str]) -> Search[list[Culprit]]:
        """The suspects of a group that failed."""
        if len(group) == 1:
            return [Culprit("node", (group[0],))]
        parts = halves(group, self.switch_of)
        answers = yield [self._with_partner(half, "bisect") for half in parts]
        bad = [
            half
            for half, answer in zip(parts, answers, strict=True)
            if not self.baseline.passes(max(2, len(half)), answer)
        ]
        if not bad:
            (again,) = yield [GroupTest(tuple(group), "bisect")]
            if self.baseline.passes(len(group), again):
                return [Culprit("passing", tuple(group))]
            return [(yield from self.pair(group, len(parts[0])))]
        one_switch = len({self.switch_of.get(node) for node in group}) == 1
        if len(bad) == 2 and one_switch and len(group) >= _SAMPLES and (yield from self.all_bad(group)):
            return [self._shared(group)]
        found = yield from side_by_side([self.bisect(half) for half in bad])
        return [culprit for some in found for culprit in some]

    def all_bad(self, group: Sequence[str]) -> Search[bool]:
        """Whether all nodes of ``group`` seem bad, judged by one node from each quarter."""
        samples = [group[index * len(group) // _SAMPLES] for index in range(_SAMPLES)]
        answers = yield [self._with_partner((node,), "sample") for node in samples]
        return not any(self.baseline.passes(2, answer) for answer in answers)

    def pair(self, order: Sequence[str], passing: int) -> Search[Culprit]:
        """The two nodes of a bad link, given that ``order`` fails as a whole and its first ``passing`` nodes pass.

        The shortest failing prefix ends in one; the shortest prefix of it that fails with that one, in the other.
        """
        length = yield from self.shortest(passing, len(order), lambda n: tuple(order[:n]))
        last = order[length - 1]
        other = yield from self.shortest(0, length - 1, lambda n: (*order[:n], last))
        return Culprit("link", (order[other - 1], last))

    def shortest(self, passing: int, failing: int, members: Callable[[int], tuple[str, ...]]) -> Search[int]:
        """The smallest n for which ``members(n)`` fails, by bisection between a passing and a failing n."""
        while failing - passing > 1:
            middle = (passing + failing) // 2
            (answer,) = yield [GroupTest(members(middle), "mixed")]
            if self.baseline.passes(len(members(middle)), answer):
                passing = middle
            else:
                failing = middle
        return failing

    def confirm(self, culprit: Culprit) -> Search[tuple[Culprit, bool]]:
        """Whether the suspicion is confirmed; for a link, also what exactly is bad."""
        if culprit.kind == "link":
            return (yield from self.explain(*culprit.parts))
        if culprit.kind == "node":
            return (yield from self.confirm_node(culprit.parts[0]))
        return culprit, culprit.kind != "passing"

    def confirm_node(self, node: str) -> Search[tuple[Culprit, bool]]:
        """Test ``node`` with two different good partners, if possible one on its own switch; a third one decides."""
        outsiders = self._partners(node)
        sibling = self._sibling(node, {node, *outsiders})
        partners = [*([sibling] if sibling else []), *outsiders][:3]
        answers = yield [GroupTest((node, partner), "confirm") for partner in partners[:2]]
        failed = [not self.baseline.passes(2, answer) for answer in answers]
        if sibling and failed == [False, True]:
            return (yield from self.alone_or_uplink(node, outsiders, sibling))
        if sum(failed) == 1 and len(partners) == 3:
            (answer,) = yield [GroupTest((node, partners[2]), "confirm")]
            failed.append(not self.baseline.passes(2, answer))
        return Culprit("node", (node,)), bool(partners) and sum(failed) >= min(2, len(partners))

    def explain(self, one: str, two: str) -> Search[tuple[Culprit, bool]]:
        """What is bad between two nodes: one of them, their link, or a path, uplink or switch that they share."""
        here, there = self.switch_of.get(one, ""), self.switch_of.get(two, "")
        outsiders = self._outsiders(one, two)
        siblings = (self._sibling(one, {one, two, *outsiders}), self._sibling(two, {one, two, *outsiders}))
        pairs: list[tuple[str, str]] = [(one, two), *zip((one, two), outsiders, strict=False)]
        if here != there and siblings[0] and siblings[1]:
            pairs.append((siblings[0], siblings[1]))
        answers = yield [GroupTest(pair, "confirm") for pair in pairs]
        passed = {pair: self.baseline.passes(2, answer) for pair, answer in zip(pairs, answers, strict=True)}
        link = Culprit("link", (one, two))
        if passed[one, two]:
            return link, False
        for node, outsider, sibling in zip((one, two), outsiders, siblings, strict=False):
            if not passed[node, outsider]:
                return (yield from self.alone_or_uplink(node, [outsider], sibling))
        if passed.get((siblings[0] or "", siblings[1] or "")) is False:
            return Culprit("path", tuple(sorted((here, there)))), True
        return link, True

    def alone_or_uplink(self, node: str, outsiders: Sequence[str], sibling: str | None) -> Search[tuple[Culprit, bool]]:
        """``node`` fails with ``outsiders``, nodes of other switches: is it the node, or the uplink of its switch?"""
        if sibling is None:
            return (yield from self.confirm_node(node))
        (answer,) = yield [GroupTest((sibling, outsiders[0]), "confirm")]
        if not self.baseline.passes(2, answer):
            return Culprit("uplink", (self.switch_of[node],)), True
        (answer,) = yield [GroupTest((node, outsiders[-1]), "confirm")]
        return Culprit("node", (node,)), not self.baseline.passes(2, answer)

    def between(self, removed: set[str]) -> Search[list[Culprit]]:
        """Faults that only show between groups: test all remaining nodes together, until that passes."""
        found: list[Culprit] = []
        for _ in range(_MAX_LINKS):
            rest = [node for node in self.nodes if node not in removed]
            if len(rest) < 2:
                break
            (answer,) = yield [GroupTest(tuple(rest), "all")]
            if self.baseline.passes(len(rest), answer):
                break
            if 2 not in self.baseline.healthy:
                yield from self.calibrate_pairs()
            culprit, confirmed = yield from self.confirm((yield from self.pair(rest, 1)))
            if not confirmed:
                break
            found.append(culprit)
            removed |= {*self._members([culprit])} if culprit.kind != "link" else {culprit.parts[0]}
        return found

    def evidence(self, number: int, test: GroupTest, answer: Answer) -> Evidence:
        """The record of one test, judged by everything known at the end."""
        size = len(test.members)
        passed, found, expected = self.baseline.passes(size, answer), level(answer), self.baseline.expected(size)
        return Evidence(number, test.purpose, test.members, passed, found, expected)

    def rotated(self, pool: Sequence[str]) -> list[str]:
        """``pool`` from a different start each time, so that no known-good node takes part in every test."""
        if not pool:
            return []
        self.turn += 1 + len(pool) // 7
        start = self.turn % len(pool)
        return [*pool[start:], *pool[:start]]

    def _with_partner(self, half: Sequence[str], purpose: str) -> GroupTest:
        members = (*half, *self._partners(half[0])[:1]) if len(half) == 1 else tuple(half)
        return GroupTest(members, purpose)

    def _outsiders(self, *nodes: str) -> list[str]:
        """Two known-good nodes on other switches than ``nodes``, if there are that many."""
        theirs = {self.switch_of.get(node, "") for node in nodes} - {""}
        pool = [n for n in self.good if n not in nodes and self.switch_of.get(n, "") not in theirs]
        return self.rotated(pool)[:2]

    def _partners(self, node: str) -> list[str]:
        """Known-good nodes, of other switches if there are any."""
        return self._outsiders(node) or [other for other in self.rotated(self.good) if other != node]

    def _sibling(self, node: str, without: set[str]) -> str | None:
        """A node of the same switch that is not suspected, a known-good one if there is any."""
        switch = self.switch_of.get(node)
        mine = [n for n in self.nodes if switch and self.switch_of.get(n) == switch and n not in without | self.bad]
        return next((n for n in mine if n in self.good), next(iter(mine), None))

    def _shared(self, group: Sequence[str]) -> Culprit:
        switches = {self.switch_of.get(node, "") for node in group}
        if len(switches) == 1 and "" not in switches:
            return Culprit("switch", (switches.pop(),))
        return Culprit("group", tuple(group))

    def _members(self, culprits: Sequence[Culprit]) -> list[str]:
        """The nodes to leave out so that the rest can be tested without these culprits."""
        switches = {c.parts[0] for c in culprits if c.kind in ("switch", "uplink", "path")}
        nodes = {p for c in culprits if c.kind in ("node", "group") for p in c.parts}
        nodes |= {c.parts[0] for c in culprits if c.kind == "link"}
        return [node for node in self.nodes if node in nodes or self.switch_of.get(node) in switches]


def _merged(culprits: Sequence[Culprit], switch_of: Mapping[str, str]) -> list[Culprit]:
    """Each culprit once. If all nodes of a switch are bad, the switch is named instead of its nodes."""
    bad = {part for culprit in culprits if culprit.kind in ("node", "group") for part in culprit.parts}
    below: dict[str, set[str]] = {}
    for node, switch in switch_of.items():
        below.setdefault(switch, set()).add(node)
    whole = [s for s, members in below.items() if len(members) >= _SHARED and members <= bad]
    switches = {*whole, *(culprit.parts[0] for culprit in culprits if culprit.kind == "switch")}
    covered = {node for switch in switches for node in below[switch]}
    kept = [c for c in culprits if not (c.kind in ("node", "group", "switch") and {*c.parts} <= covered | switches)]
    return [*(Culprit("switch", (switch,)) for switch in sorted(switches)), *dict.fromkeys(kept)]
