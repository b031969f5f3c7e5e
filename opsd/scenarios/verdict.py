"""Compare what the agent did in a scenario with what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opsd.runbooks.base import Incident
from opsd.scenarios.model import Expectation, Scenario
from opsd.scenarios.player import PlayedScenario


@dataclass(frozen=True, slots=True)
class Hit:
    """An expected incident that opened: ``latency_s`` after the fault, with the right culprit or not.

    A verdict after the fact has no latency.
    """

    kind: str
    latency_s: float | None
    culprit_right: bool


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """``problems`` are sentences, none if all is as expected. ``missed`` and ``false_alarms`` are kinds."""

    hits: tuple[Hit, ...]
    missed: tuple[str, ...]
    false_alarms: tuple[str, ...]
    problems: tuple[str, ...]


def judge(scenario: Scenario, played: PlayedScenario) -> ScenarioResult:
    """Match incidents with expectations: each expectation takes the first incident of its kind with its culprit."""
    unclaimed = sorted(played.incidents.values(), key=lambda incident: played.opened[incident.id])
    hits, missed, problems = list[Hit](), list[str](), list(played.errors)
    for wanted in scenario.expect:
        candidates = [incident for incident in unclaimed if incident.kind == wanted.kind]
        found = next((c for c in candidates if _culprit_right(wanted, c)), candidates[0] if candidates else None)
        if found is None:
            missed.append(wanted.kind)
            problems.append(f"{wanted.kind} was not found")
            continue
        unclaimed.remove(found)
        symptoms = [i for i in unclaimed if i.cause == found.id and i.kind in wanted.symptoms]
        unclaimed = [incident for incident in unclaimed if incident not in symptoms]
        lacking = set(wanted.symptoms) - {symptom.kind for symptom in symptoms}
        problems += [f"{wanted.kind} has no symptom {kind}" for kind in sorted(lacking)]
        latency = played.opened[found.id] - scenario.fault_at(wanted)
        hits.append(Hit(wanted.kind, latency, _culprit_right(wanted, found)))
        problems += _problems(wanted, found, latency, played)
    false_alarms = [incident for incident in unclaimed if incident.kind not in scenario.allow]
    problems += [
        f"false alarm at {played.opened[i.id]:.0f} s: {i.kind}, culprit {i.culprit}: {i.summary}" for i in false_alarms
    ]
    named = tuple(f"[{played.mode}] {problem}" for problem in problems)
    return ScenarioResult(tuple(hits), tuple(missed), tuple(i.kind for i in false_alarms), named)


def _culprit_right(wanted: Expectation, incident: Incident) -> bool:
    culprit = incident.culprit
    return all(
        str(value) in culprit.detail if name == "detail" else getattr(culprit, name) == value
        for name, value in wanted.culprit.items()
    )


def _problems(wanted: Expectation, incident: Incident, latency: float, played: PlayedScenario) -> Iterator[str]:
    if not 0 <= latency <= wanted.within:
        yield f"{wanted.kind} was found {latency:.0f} s after the fault, expected within {wanted.within:.0f} s"
    if not _culprit_right(wanted, incident):
        yield f"{wanted.kind} blames {incident.culprit!r}, expected {wanted.culprit}"
    if wanted.severity is not None and incident.severity != wanted.severity:
        yield f"{wanted.kind} is {incident.severity}, expected {wanted.severity}"
    carried_out = tuple(action.verb for _, id, action in played.actions if id == incident.id)
    expected = {"act": wanted.actions, "observe": (), "recommend": tuple(v for v in wanted.actions if v == "notify")}
    if carried_out != expected[played.mode]:
        yield f"{wanted.kind} was answered with {carried_out}, expected {expected[played.mode]}"
    state = wanted.state.get(played.mode)
    if state is not None and incident.state != state:
        yield f"{wanted.kind} ends {incident.state} ({incident.verdict}), expected {state}"
    said = " | ".join([incident.summary, incident.cost.text, *(evidence.text for evidence in incident.evidence)])
    for text in wanted.evidence:
        if text not in said:
            yield f"{wanted.kind} does not say {text!r} but: {said}"
