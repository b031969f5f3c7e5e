"""The verdict on what a check measured: pure functions of measurements, limits, peers, fleet and history.

Every value is compared with up to five yardsticks, and the worst verdict counts:

- An absolute limit, from the check or from the configuration.
- Its peers on the node (the other GPUs, cores, ports): median and best.
- The fleet's median of the same measure.
- The node's own last runs, by median and median absolute deviation. It is reported even above every floor.
- For counters, the growth since the last run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from opsd.preflight.base import Bounds, Check, Finding, Measure, Measurement, Outcome, Verdict, duration, quantity
from opsd.preflight.report import Result, Value

MAD_TO_SIGMA: Final = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median. Raises StatisticsError without values."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of the values do not exceed. Raises IndexError if empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


_SIGMAS: Final = 4.0
_MIN_RUNS: Final = 3
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Past:
    """One earlier value of a series and when it was measured, in wall seconds."""

    at: float
    value: float


SeriesKey = tuple[str, str]
"""Measure and subject."""


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """The references for a check's values, in addition to the check's own limits.

    ``limits`` override the check's by measure name, ``past`` holds the node's last runs, oldest first, ``facts`` those
    of the last run, ``fleet`` the fleet's medians by measure name.
    """

    limits: Mapping[str, Bounds] = field(default_factory=dict)
    past: Mapping[SeriesKey, Sequence[Past]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    fleet: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Missing ``normal`` by more than the share ``tolerance`` gives ``verdict``."""

    label: str
    normal: float
    tolerance: float
    verdict: Verdict

    def missed(self, value: float, better: str) -> bool:
        slack = abs(self.normal) * self.tolerance
        return value < self.normal - slack if better == "higher" else value > self.normal + slack


def judge(check: Check, outcome: Outcome, started: float, yardsticks: Yardsticks = Yardsticks()) -> Result:
    """The result of ``check``, whose ``outcome`` was measured from wall second ``started`` on: its worst finding.

    A value that is not a number, and a speed of zero, always fail.
    """
    measures = {measure.name: measure for measure in check.measures}
    values: list[Value] = []
    findings = [*outcome.findings]
    for measurement in outcome.measurements:
        measure = measures[measurement.measure]
        if not math.isfinite(measurement.value):
            summary = f"{_name(measure, measurement.subject)} is {measurement.value}"
            findings.append(Finding(Verdict.FAIL, summary, check.advice, measurement.subject))
            continue
        value, finding = _judge_value(check, measure, measurement, outcome.measurements, started, yardsticks)
        values.append(value)
        findings += [finding] if finding else []
    findings += _missing(measures.values(), outcome.measurements)
    if check.stable:
        findings += _changed(outcome.facts, yardsticks.facts)
    findings.sort(key=lambda finding: -finding.verdict.rank)
    worst = max((finding.verdict for finding in findings), key=lambda verdict: verdict.rank, default=Verdict.PASS)
    return Result(
        check.name,
        check.title,
        worst,
        values=tuple(values),
        findings=tuple(findings),
        facts=outcome.facts,
        started=started,
        runbook=check.runbook,
    )


def _judge_value(
    check: Check,
    measure: Measure,
    measurement: Measurement,
    all_measurements: Sequence[Measurement],
    now: float,
    yardsticks: Yardsticks,
) -> tuple[Value, Finding | None]:
    number, subject = measurement.value, measurement.subject
    if measure.better == "higher" and number <= 0:
        value = Value(measure.name, subject, number, measure.unit, Verdict.FAIL, better=measure.better)
        return value, Finding(Verdict.FAIL, f"{_name(measure, subject)} is {number:g}", check.advice, subject)
    past = yardsticks.past.get((measure.name, subject), ())
    peers = [m.value for m in all_measurements if m.measure == measure.name]
    bounds = [*_bounds(measure, peers, past, yardsticks)] if measure.better else []
    missed = [bound for bound in bounds if bound.missed(number, measure.better)]
    worst = max(missed, key=lambda bound: bound.verdict.rank, default=None)
    grown = _growth(measure, number, past, now)
    finding = None
    if worst is not None:
        sentence = f"{_name(measure, subject)} is {quantity(number, measure.unit)}, {_distance(number, worst, measure)}"
        finding = Finding(worst.verdict, sentence, check.advice, subject)
    if grown is not None and (finding is None or grown[0].rank > finding.verdict.rank):
        finding = Finding(grown[0], f"{_name(measure, subject)} {grown[1]}", check.advice, subject)
    verdict = finding.verdict if finding else Verdict.PASS
    normal = worst.normal if worst else next((bound.normal for bound in reversed(bounds)), None)
    return Value(measure.name, subject, number, measure.unit, verdict, normal, measure.better), finding


def _bounds(measure: Measure, peers: Sequence[float], past: Sequence[Past], yardsticks: Yardsticks) -> Iterator[_Bound]:
    limits = yardsticks.limits.get(measure.name, measure.limits)
    for limit, verdict in ((limits.fail, Verdict.FAIL), (limits.warn, Verdict.WARN)):
        if limit is not None:
            yield _Bound("the limit of", limit, 0.0, verdict)
    if measure.peers is not None:
        if len(peers) > 1:
            best = max(peers) if measure.better == "higher" else min(peers)
            yield _Bound("the best on this node,", best, measure.peers.fail, Verdict.FAIL)
            yield _Bound("this node's median of", median(peers), measure.peers.warn, Verdict.WARN)
        if measure.name in yardsticks.fleet:
            yield _Bound("the fleet's median of", yardsticks.fleet[measure.name], measure.peers.warn, Verdict.WARN)
    if len(past) >= _MIN_RUNS and not measure.growth:
        values = [entry.value for entry in past]
        normal = median(values)
        scatter = _SIGMAS * MAD_TO_SIGMA * mad(values) / abs(normal) if normal else 0.0
        yield _Bound(f"the median of its last {len(past)} runs,", normal, max(measure.noise, scatter), Verdict.WARN)


def _growth(measure: Measure, number: float, past: Sequence[Past], now: float) -> tuple[Verdict, str] | None:
    """Verdict and sentence if a counter grew too much; a counter below its last value was reset."""
    if measure.growth is None or not past:
        return None
    last = past[-1]
    increase = number - last.value if number >= last.value else number
    per_day = increase / max(1.0, (now - last.at) / _DAY_S)
    sentence = (
        f"grew by {quantity(increase, measure.unit)} in the {duration(max(1.0, now - last.at))} since the last run"
    )
    for limit, verdict in ((measure.growth.fail, Verdict.FAIL), (measure.growth.warn, Verdict.WARN)):
        if limit is not None and per_day >= limit:
            return verdict, sentence
    return None


def _missing(measures: Iterable[Measure], measurements: Sequence[Measurement]) -> Iterator[Finding]:
    present = {measurement.measure for measurement in measurements}
    for measure in measures:
        if measure.required and measure.name not in present:
            yield Finding(Verdict.COULD_NOT_RUN, f"{measure.help} was not measured")


def _changed(facts: Mapping[str, str], before: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in facts.items():
        if name in before and before[name] != value:
            advice = "make sure that the change was planned and that all nodes have it"
            yield Finding(Verdict.WARN, f"{name} was {before[name]} in the last run and is {value} now", advice)
    for name in before.keys() - facts.keys():
        yield Finding(Verdict.WARN, f"{name} was {before[name]} in the last run and is not there now")


def _name(measure: Measure, subject: str) -> str:
    return f"{subject}: {measure.help}" if subject else measure.help[:1].upper() + measure.help[1:]


def _distance(number: float, bound: _Bound, measure: Measure) -> str:
    side = "below" if measure.better == "higher" else "above"
    # A share of a share ("81% above 50%") would be misread.
    relative = bound.normal and measure.unit != "ratio"
    share = f"{abs(number - bound.normal) / abs(bound.normal):.0%} {side}" if relative else side
    return f"{share} {bound.label} {quantity(bound.normal, measure.unit)}"
