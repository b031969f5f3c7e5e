"""Clusters with planted faults, which answer the group tests of the search for a bad node like real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from opsd.preflight.finder import Answer, Culprit, Diagnosis, GroupTest, find
from opsd.slurm.topology import even

BANDWIDTH: Final = 42e9
"""Bytes per second of a healthy pair across nodes with 400 Gbit/s (NCCL reaches 42-43 GB/s between two of them)."""
ITERATIONS: Final = 48
NOISE: Final = 0.02
"""Relative standard deviation of one pair's bandwidth from iteration to iteration."""
SLOW: Final = 0.7


@dataclass(frozen=True, slots=True)
class Fault:
    """A culprit and its effect: bandwidth times ``factor``, in a share of the tests and of their iterations.

    A ``factor`` of 0 is a test that never ends.
    """

    culprit: Culprit
    factor: float = SLOW
    of_tests: float = 1.0
    of_iterations: float = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Nodes below leaf switches, ``switch_of`` each, and their faults."""

    nodes: Sequence[str]
    switch_of: Mapping[str, str]
    faults: Sequence[Fault]
    random: Random

    def answer(self, test: GroupTest) -> Answer:
        """The slowest pair's bandwidth in every iteration of ``test``."""
        present = [f for f in self.faults if self._touches(f.culprit, test) and self.random.random() < f.of_tests]
        if any(fault.factor == 0 for fault in present):
            return Answer(())
        pairs = len(test.members) * (len(test.members) - 1) // 2
        # Expected minimum of n normal values: about -sqrt(2 ln n) standard deviations.
        unlucky = 1 - NOISE * math.sqrt(2 * math.log(pairs))
        return Answer(tuple(self._iteration(present, unlucky) for _ in range(ITERATIONS)))

    def _iteration(self, present: Sequence[Fault], unlucky: float) -> float:
        factors = [fault.factor for fault in present if self.random.random() < fault.of_iterations]
        return BANDWIDTH * min(factors, default=1.0) * unlucky * self.random.gauss(1.0, NOISE)

    def _touches(self, culprit: Culprit, test: GroupTest) -> bool:
        """Whether a pair of the test uses the faulty part."""
        switches = {self.switch_of[node] for node in test.members}
        match culprit.kind:
            case "node" | "link":
                return {*culprit.parts} <= {*test.members}
            case "switch":
                return culprit.parts[0] in switches
            case "uplink":
                return culprit.parts[0] in switches and len(switches) > 1
        return culprit.kind == "path" and {*culprit.parts} <= switches


def cluster(count: int, per_switch: int) -> dict[str, str]:
    """``count`` nodes to their switches, ``per_switch`` on each, in the order of their names."""
    return dict(even([f"node-{index:04}" for index in range(count)], per_switch).leaf)


def search(simulated: SimulatedCluster, *, topology: bool = True) -> Diagnosis:
    """Run the finder on the simulated cluster; without ``topology`` it does not know the switches."""
    finder = find(simulated.nodes, simulated.switch_of if topology else None)
    tests = next(finder)
    while True:
        try:
            tests = finder.send([simulated.answer(test) for test in tests])
        except StopIteration as end:
            diagnosis: Diagnosis = end.value
            return diagnosis


Plant = Callable[[Random, Mapping[str, str]], list[Fault]]


def _node(random: Random, switch_of: Mapping[str, str], **how: float) -> Fault:
    return Fault(Culprit("node", (random.choice([*switch_of]),)), **how)


def _link(random: Random, switch_of: Mapping[str, str]) -> Fault:
    return Fault(Culprit("link", tuple(sorted(random.sample([*switch_of], 2)))))


def _two(random: Random, switch_of: Mapping[str, str]) -> list[Fault]:
    """Two different faults that share no node, of the kinds slow node, dead node and bad link."""
    while True:
        kinds: Iterator[Fault] = (
            random.choice([_node(random, switch_of), _node(random, switch_of, factor=0.0), _link(random, switch_of)])
            for _ in range(2)
        )
        one, two = kinds
        if {*one.culprit.parts}.isdisjoint(two.culprit.parts):
            return [one, two]


def _switch(kind: str) -> Plant:
    def plant(random: Random, switch_of: Mapping[str, str]) -> list[Fault]:
        name = (random.choice(sorted({*switch_of.values()})),)
        return [Fault(Culprit("switch", name) if kind == "switch" else Culprit("uplink", name))]

    return plant


PLANTS: Final[Mapping[str, Plant]] = {
    "nothing": lambda random, switch_of: [],
    "slow node": lambda random, switch_of: [_node(random, switch_of)],
    "dead node": lambda random, switch_of: [_node(random, switch_of, factor=0.0)],
    "bad link": lambda random, switch_of: [_link(random, switch_of)],
    "bad switch": _switch("switch"),
    "bad uplink": _switch("uplink"),
    "two at once": _two,
    "flaky in 30 % of the iterations": lambda random, switch_of: [_node(random, switch_of, of_iterations=0.3)],
    "flaky in 30 % of the tests": lambda random, switch_of: [_node(random, switch_of, of_tests=0.3)],
}
"""No search can find the last kind with certainty in so few tests.

A node that shows in 30 % of its tests gives at most log2(1 + 0.3 * 0.7**(7/3)) = 0.18 bits per test (Z-channel). To
name one of 232 nodes with 99 % certainty takes log2(232 / 0.01) = 14.5 bits, which is 82 tests. Longer tests turn this
kind into the previous one.
"""


def right(faults: Sequence[Fault], diagnosis: Diagnosis) -> bool:
    """Whether exactly the planted culprits were found."""
    named = {(culprit.kind, tuple(sorted(culprit.parts))) for culprit in diagnosis.culprits}
    return named == {(fault.culprit.kind, fault.culprit.parts) for fault in faults}


def score(plant: str, nodes: int, per_switch: int, trials: int, seed: int) -> tuple[int, int]:
    """Of ``trials`` seeded trials: how many are right, and the most tests that one takes."""
    random = Random(f"{plant} {nodes} {seed}")
    switch_of = cluster(nodes, per_switch)
    outcomes = []
    for _ in range(trials):
        faults = PLANTS[plant](random, switch_of)
        outcomes.append((faults, search(SimulatedCluster([*switch_of], switch_of, faults, random))))
    return sum(right(*outcome) for outcome in outcomes), max(diagnosis.tests for _, diagnosis in outcomes)
