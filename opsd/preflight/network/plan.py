"""What a network check measures: collectives over all nodes, patterns, and the search for bad parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from opsd import __version__
from opsd.preflight.base import Check, Finding, Interrupted, Measure, Measurement, Outcome, Verdict, quantity
from opsd.preflight.finder import Answer, Diagnosis, Evidence, GroupTest, Tolerance, find
from opsd.preflight.judge import Yardsticks, judge, nearest_rank
from opsd.preflight.network.coordinator import Coordinator, Done, Joined, Pattern, Spec
from opsd.preflight.network.member import Participant
from opsd.preflight.report import Report, Result
from opsd.slurm.hostlist import compress

FACTORS: Final[Mapping[str, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}


def algbw(size: int, seconds: float) -> float:
    """Bytes per second of a collective over ``size`` bytes in total."""
    return size / seconds


def busbw(collective: str, size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each link carried. Raises KeyError for a collective without a factor."""
    return algbw(size, seconds) * FACTORS[collective](ranks)


def sizes(low: int = 1 << 10, high: int = 8 << 30, factor: int = 8) -> list[int]:
    """Message sizes in bytes from ``low`` to ``high`` inclusive, each ``factor`` times the previous one."""
    found = []
    size = low
    while size < high:
        found.append(size)
        size *= factor
    return [*found, high]


@dataclass(frozen=True, slots=True)
class Timing:
    """The iteration times of one collective at one size, in seconds; ``size`` is the total in bytes."""

    collective: str
    size: int
    ranks: int
    seconds: tuple[float, ...]

    @property
    def latency(self) -> float:
        """Median seconds of an iteration."""
        return median(self.seconds)

    @property
    def p99(self) -> float:
        """99th percentile of the seconds of an iteration."""
        return nearest_rank(self.seconds, 0.99)

    @property
    def algbw(self) -> float:
        """Bytes per second of the median iteration."""
        return algbw(self.size, self.latency)

    @property
    def busbw(self) -> float:
        """Bus bandwidth of the median iteration."""
        return busbw(self.collective, self.size, self.latency, self.ranks)


_PATTERNS: Final[Mapping[Pattern, str]] = {
    "ring": "ring neighbours",
    "pairs": "all pairs",
    "permutations": "random permutations",
    "incast": "all to one",
}
_LATENCY_SIZE: Final = 1 << 10
PAIR: Final = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """Thoroughness: sizes of collectives and of a message in patterns and search, in bytes; iterations and seconds."""

    sizes: Sequence[int]
    message: int
    iterations: int
    seconds: float
    deadline_s: float


def effort(profile: str, *, gpus: bool) -> Effort:
    """The effort of a profile. Without GPUs messages are small: TCP has a hundredth of NVLink's bandwidth."""
    if profile == "quick":
        return Effort(sizes(1 << 10, 64 << 20 if gpus else 1 << 20, 64), 64 << 20 if gpus else 1 << 20, 10, 0.5, 30.0)
    top = 8 << 30 if gpus else 64 << 20
    return Effort(sizes(1 << 10, top), 256 << 20 if gpus else 4 << 20, 40, 3.0, 300.0)


COLLECTIVES: Final = Check(
    name="network_collectives",
    title="Collectives over all nodes",
    measures=(
        *(
            Measure(f"{name}_busbw", "bytes_per_second", f"{name} bus bandwidth", "higher", noise=0.10, required=False)
            for name in FACTORS
        ),
        Measure("latency", "seconds", f"latency at {_LATENCY_SIZE} bytes", "lower", noise=0.5, required=False),
        Measure("latency_p99", "seconds", f"p99 latency at {_LATENCY_SIZE} bytes", "lower", noise=1.0, required=False),
    ),
    needs=frozenset({"network", "exclusive"}),
    advice="the search below says which node or link it is",
)
PATTERNS: Final = Check(
    name="network_patterns",
    title="Patterns of messages between nodes",
    measures=(Measure("bandwidth", "bytes_per_second", "slowest exchange", "higher", noise=0.10),),
    needs=frozenset({"network", "exclusive"}),
)
SEARCH: Final = Check(
    name="network_search",
    title="Search for bad nodes and links",
    measures=(Measure("tests", "", "number of group tests"), Measure("rounds", "", "number of rounds")),
    needs=frozenset({"network", "exclusive"}),
)
NETWORK: Final = (COLLECTIVES, PATTERNS, SEARCH)


def collectives(
    coordinator: Coordinator, nodes: Sequence[int], ranks: int, how: Effort, say: Callable[[str], None]
) -> Outcome:
    """Every collective at every size over all ``nodes`` with ``ranks`` processes in total.

    Of two nodes the first failure is all there is to know: each further one would wait for its deadline.
    """
    measurements: list[Measurement] = []
    findings: list[Finding] = []
    for name in FACTORS:
        for size in how.sizes:
            say(f"{name} {quantity(size, 'bytes')}")
            (measured,) = coordinator.measure(
                [Spec(tuple(nodes), "collective", size, how.iterations, how.seconds, name)]
            )
            if not measured.seconds:
                findings.append(Finding(Verdict.FAIL, f"{name} of {quantity(size, 'bytes')} failed: {measured.error}"))
                if len(nodes) == PAIR:
                    return Outcome(tuple(measurements), tuple(findings))
                break
            timing = Timing(name, size, ranks, measured.seconds)
            where = f"{quantity(size, 'bytes')} on {len(nodes)} nodes"
            measurements.append(Measurement(f"{name}_busbw", timing.busbw, where))
            if size == _LATENCY_SIZE:
                measurements.append(Measurement("latency", timing.latency, f"{name} on {len(nodes)} nodes"))
                measurements.append(Measurement("latency_p99", timing.p99, f"{name} on {len(nodes)} nodes"))
    return Outcome(tuple(measurements), tuple(findings))


def patterns(coordinator: Coordinator, nodes: Sequence[int], how: Effort, say: Callable[[str], None]) -> Outcome:
    """Bandwidth of the slowest exchange in each pattern."""
    measurements: list[Measurement] = []
    findings: list[Finding] = []
    for pattern, text in _PATTERNS.items():
        say(text)
        (measured,) = coordinator.measure([Spec(tuple(nodes), pattern, how.message, how.iterations, how.seconds)])
        if measured.seconds:
            rate = how.message / median(measured.seconds)
            measurements.append(Measurement("bandwidth", rate, f"{text} on {len(nodes)} nodes"))
        else:
            findings.append(Finding(Verdict.FAIL, f"{text} failed: {measured.error}"))
    return Outcome(tuple(measurements), tuple(findings))


def search(
    coordinator: Coordinator,
    names: Mapping[int, str],
    switch_of: Mapping[str, str],
    how: Effort,
    say: Callable[[str], None],
    tolerance: Tolerance | None = None,
) -> Diagnosis:
    """Run the finder on the nodes ``names`` (number to name). Fewer than two nodes have nothing to search."""
    number = {name: node for node, name in names.items()}
    finder = find([names[node] for node in sorted(names)], switch_of, tolerance)
    tests = next(finder)
    while True:
        say(f"{len(tests)} tests, {tests[0].purpose}")
        request = [_request(test, number, how) for test in tests]
        measured = coordinator.measure(request)
        try:
            tests = finder.send([_answer(entry, how.message) for entry in measured])
        except StopIteration as end:
            diagnosis: Diagnosis = end.value
            return diagnosis


def _request(test: GroupTest, number: Mapping[str, int], how: Effort) -> Spec:
    return Spec(tuple(number[name] for name in test.members), "pairs", how.message, how.iterations, how.seconds)


def _answer(measured: Done, message: int) -> Answer:
    return Answer(tuple(message / seconds for seconds in measured.seconds))


def findings(diagnosis: Diagnosis) -> Iterator[Finding]:
    """The culprits with their evidence, what was only suspected, and failures without an explanation."""
    for culprit in diagnosis.culprits:
        involved = [e for e in diagnosis.evidence if not e.passed and {*culprit.parts} & {*e.members}]
        if culprit.kind == "everything":
            advice = "check that the nodes reach each other at all: addresses, firewall, subnet manager"
            yield Finding(Verdict.FAIL, "not even one pair of nodes passes", advice)
            continue
        advice = "drain what it names and check cables, transceivers and clocks there"
        text = "; ".join(evidence(entry) for entry in involved[-2:])
        yield Finding(Verdict.FAIL, f"{culprit} is bad{': ' + text if text else ''}", advice, ", ".join(culprit.parts))
    if diagnosis.suspected:
        summary = f"a test of {compress(diagnosis.suspected)} failed once and passed when repeated"
        yield Finding(Verdict.WARN, summary, "repeat with more iterations: `opsd preflight network --profile standard`")
    elif not diagnosis.culprits and not diagnosis.clean:
        advice = "repeat with more iterations: `opsd preflight network --profile standard`"
        yield Finding(Verdict.WARN, "a test failed that could not be repeated or explained", advice)


def protocol(diagnosis: Diagnosis) -> dict[str, str]:
    """Every test of the search with its result, to be stored with the report."""
    if all(entry.purpose == "pair" for entry in diagnosis.evidence):
        unknown = {"speed": "not judged by this search: the only pair has no other to compare with"}
    else:
        unknown = {}
    return unknown | {
        f"test {number}, round {e.round}, {e.purpose}": f"{'passed' if e.passed else 'FAILED'}: {evidence(e)}"
        for number, e in enumerate(diagnosis.evidence, start=1)
    }


def evidence(entry: Evidence) -> str:
    """One test as a phrase: "n1 with n2 reached 12.3 GB/s of 42 GB/s"."""
    who = " with ".join(entry.members) if len(entry.members) == 2 else compress(entry.members)
    if entry.found is None:
        return f"{who} did not finish"
    measure, expected = entry.found.median, entry.expected.median if entry.expected else None
    of = f" of {quantity(expected, 'bytes_per_second')}" if expected else ""
    return f"{who} reached {quantity(measure, 'bytes_per_second')}{of}"


JOIN = Check(
    name="network_join",
    title="Nodes that take part",
    measures=(Measure("joined", "", "number of nodes"),),
    needs=frozenset({"network"}),
)


@dataclass(frozen=True, slots=True)
class Scope:
    """How thoroughly to measure, the nodes' switches, and whether only to search."""

    profile: str
    effort: Effort
    switch_of: Mapping[str, str]
    only_search: bool = False


def run_check(
    participant: Participant,
    coordinator: Coordinator,
    scope: Scope,
    yardsticks: Callable[[Check], Yardsticks],
    say: Callable[[str], None],
) -> Report:
    """Wait for the nodes, measure, search. Nodes that never join are a failure and are left out of the rest."""
    started = time.time()
    results: list[Result] = []
    interrupted = False
    try:
        for check, began, outcome in _steps(participant, coordinator, scope, say):
            took = time.time() - began
            results.append(replace(judge(check, outcome, began, yardsticks(check)), seconds=took))
    except Interrupted:
        interrupted = True
    return Report(label_of(participant), scope.profile, __version__, started, time.time(), tuple(results), interrupted)


def label_of(participant: Participant) -> str:
    """The name of the report in the history: speeds are compared between jobs of the same number of nodes."""
    count = len(participant.place.names)
    return f"network of {count} node{'s' if count > 1 else ''}"


def slowest_rate(report: Report) -> float:
    """Bytes per second of the slowest exchange between nodes, 0 if none was measured."""
    values = (value for result in report.results if result.check == PATTERNS.name for value in result.values)
    return min((value.value for value in values if value.measure == "bandwidth"), default=0.0)


def _steps(
    participant: Participant, coordinator: Coordinator, scope: Scope, say: Callable[[str], None]
) -> Iterator[tuple[Check, float, Outcome]]:
    began = time.time()
    say("waiting for nodes")
    joined = coordinator.gather(participant.join_s)
    yield JOIN, began, join_outcome(participant, joined)
    nodes = sorted(joined)
    if not scope.only_search and (len(nodes) > 1 or coordinator.processes > 1):
        began = time.time()
        ranks = len(nodes) * coordinator.processes
        outcome = collectives(coordinator, nodes, ranks, scope.effort, say)
        yield COLLECTIVES, began, outcome
        if len(nodes) == PAIR and any(finding.verdict is Verdict.FAIL for finding in outcome.findings):
            return
    if len(nodes) > 1:
        if not scope.only_search:
            began = time.time()
            yield PATTERNS, began, patterns(coordinator, nodes, scope.effort, say)
        began = time.time()
        names = {node: joined[node].name for node in nodes}
        diagnosis = search(coordinator, names, scope.switch_of, scope.effort, say)
        used = (Measurement("tests", diagnosis.tests), Measurement("rounds", diagnosis.rounds))
        yield SEARCH, began, Outcome(used, tuple(findings(diagnosis)), protocol(diagnosis))


def _gpus(processes: int, backend: str) -> int:
    return processes if backend == "nccl" else 0


def join_outcome(participant: Participant, joined: Mapping[int, Joined]) -> Outcome:
    """Nodes that never joined, or joined with another version or number of GPUs: of two nodes that is no fault.

    A pair is there to measure the way between them, which it does with as many GPUs as both have.
    """
    names = participant.place.names
    findings = []
    if absent := [names[node] for node in range(len(names)) if node not in joined]:
        summary = f"{compress(absent)} never joined within {participant.join_s:.0f} s"
        advice = "check that the node is up, that the command runs there and that it reaches the first node's port"
        findings.append(Finding(Verdict.FAIL, summary, advice, compress(absent)))
    for member in joined.values():
        if member.version != __version__:
            summary = f"{member.name} runs opsd {member.version}, the first node {__version__}"
            findings.append(Finding(Verdict.FAIL, summary, "install the same release everywhere", member.name))
        here, there = _gpus(participant.processes, participant.backend), _gpus(member.processes, member.backend)
        if here != there:
            summary = f"{member.name} came with {there} GPUs, the first node with {here}"
            verdict, advice = Verdict.FAIL, "a GPU is missing on one of them"
            if len(names) == 2:
                verdict, advice = Verdict.WARN, f"it is measured with {min(here, there)} of each"
            findings.append(Finding(verdict, summary, advice, member.name))
    return Outcome((Measurement("joined", len(joined)),), tuple(findings), {"nodes": compress(names)})
