"""The network check from the coordinator's side; the outcome is an ordinary report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from opsd import __version__
from opsd.preflight.base import Check, Finding, Interrupted, Measure, Measurement, Outcome, Verdict
from opsd.preflight.judge import Yardsticks, judge
from opsd.preflight.network import plan
from opsd.preflight.network.coordinator import Coordinator, Joined
from opsd.preflight.network.member import Participant
from opsd.preflight.network.plan import COLLECTIVES, PAIR, PATTERNS, SEARCH, Effort
from opsd.preflight.report import Report, Result
from opsd.slurm.hostlist import compress

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
        outcome = plan.collectives(coordinator, nodes, ranks, scope.effort, say)
        yield COLLECTIVES, began, outcome
        if len(nodes) == PAIR and any(finding.verdict is Verdict.FAIL for finding in outcome.findings):
            return
    if len(nodes) > 1:
        if not scope.only_search:
            began = time.time()
            yield PATTERNS, began, plan.patterns(coordinator, nodes, scope.effort, say)
        began = time.time()
        names = {node: joined[node].name for node in nodes}
        diagnosis = plan.search(coordinator, names, scope.switch_of, scope.effort, say)
        used = (Measurement("tests", diagnosis.tests), Measurement("rounds", diagnosis.rounds))
        yield SEARCH, began, Outcome(used, tuple(plan.findings(diagnosis)), plan.protocol(diagnosis))


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
