"""Group tests: definitions, running searches in parallel, the baseline of healthy groups, and the diagnosis."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple, TypeVar

from opsd.preflight.stats import nearest_rank

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
