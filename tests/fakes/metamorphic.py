"""Transformations of a scenario that must not matter, and what differs nevertheless.

Each is a plain function of a scenario, of how it was played undisturbed, and of a source of chance; None where it has
no meaning. ``differences`` compares the incidents: kind, key, culprit and job, each once, and nothing left open.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Incident
from opsd.scenarios.model import Mode, Moment, Scenario
from opsd.scenarios.player import PlayedScenario, play

HOUR_S = 3600.0
BLIND_S = 20.0
AFTER_S = 50.0
"""Seconds by which a scenario is played on, so that what is over can end."""
CLOCK = frozenset({"clock_skew", "clock_unstable"})
"""Kinds that a step of the clock may open."""
OF_RUNS = frozenset(book.kind for book in RUNBOOKS if book.proved_by == "run")
"""Kinds whose end only their run can show, so that they end with it."""
WITHOUT_RUN = frozenset({"gpu_idle"})
"""Kinds that the end of a run may open: its job still holds the GPUs."""

Transformation = Callable[[Scenario, PlayedScenario, random.Random], Scenario | None]


def mode_of(scenario: Scenario) -> Mode:
    """The mode in which ``scenario`` is played: that in which opsd does most."""
    return "act" if "act" in scenario.played_in else scenario.played_in[0]


def run_ends(after_s: float, scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """The run ends ``after_s`` seconds after the last incident opened."""
    return _finished(scenario, _last_opened(scenario, played) + after_s)


def run_ends_when_resolved(scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """The run ends one second after the last incident ended."""
    ended = [second for second, transition in played.transitions if transition.after in ("resolved", "unproven")]
    opened = max(played.opened.values(), default=0.0)
    return _finished(scenario, max(ended) + 1.0) if ended and max(ended) >= opened else None


def agent_restarts(scenario: Scenario, played: PlayedScenario, rng: random.Random) -> Scenario | None:
    """The agent ends and starts again at some instant after the first incident opened."""
    first = min(played.opened.values(), default=scenario.duration / 2)
    return _with(scenario, Moment(t=rng.uniform(first + 1.0, scenario.duration), agent_restart=True))


def agent_restarts_early(scenario: Scenario, played: PlayedScenario, rng: random.Random) -> Scenario | None:
    """The agent ends and starts again at some instant between the fault and the incident."""
    begin = min((m.t for m in scenario.at), default=0.0)
    first = min(played.opened.values(), default=scenario.duration)
    changed = _with(scenario, Moment(t=rng.uniform(begin, max(begin, first)), agent_restart=True))
    waits_anew = max(0.0, first - begin)
    return changed.model_copy(update={"duration": changed.duration + waits_anew})


def clock_steps(step_s: float, scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """The wall clock is stepped by ``step_s`` while the incident is open."""
    return _with(scenario, Moment(t=_last_opened(scenario, played) + 2.5, clock=step_s))


def events_twice(scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """The run's event files are replaced, as by a restored folder, so that each event is read a second time."""
    return _with(scenario, Moment(t=_last_opened(scenario, played) + 2.5, read_again=True))


def collector_blind(collector: str, scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """A collector fails for 20 s while the incident is open."""
    begin = _last_opened(scenario, played) + 2.5
    if any(collector in (*m.blind, *m.hung, *m.sighted) for m in scenario.at):
        return None
    return _with(scenario, Moment(t=begin, blind=(collector,)), Moment(t=begin + BLIND_S, sighted=(collector,)))


TRANSFORMATIONS: Mapping[str, Transformation] = {
    "run ends while open": partial(run_ends, 3.0),
    "run ends when resolved": run_ends_when_resolved,
    "run ends later": partial(run_ends, 20.0),
    "agent restarts": agent_restarts,
    "agent restarts early": agent_restarts_early,
    "clock forward": partial(clock_steps, HOUR_S),
    "clock back": partial(clock_steps, -HOUR_S),
    "events twice": events_twice,
    "ranks blind": partial(collector_blind, "ranks"),
    "nvml blind": partial(collector_blind, "nvml"),
    "kmsg blind": partial(collector_blind, "kmsg"),
    "host blind": partial(collector_blind, "host"),
}


def differences(scenario: Scenario, name: str, seed: int = 0) -> list[str]:
    """What is not as in the undisturbed scenario after the transformation ``name``; [] if it did not matter."""
    mode = mode_of(scenario)
    longer = scenario.model_copy(update={"duration": scenario.duration + AFTER_S})
    plain = play(longer, mode)
    changed = TRANSFORMATIONS[name](longer, plain, random.Random(seed))
    if changed is None:
        return []
    return [*_differences(scenario, name, plain, play(changed, mode))]


def _differences(scenario: Scenario, name: str, plain: PlayedScenario, other: PlayedScenario) -> Iterator[str]:
    yield from (f"error: {error.strip().splitlines()[-1]}" for error in other.errors)
    before, after = Counter(map(_about, plain.incidents.values())), Counter(map(_about, other.incidents.values()))
    ignored = {*scenario.allow} | (CLOCK if "clock" in name else set()) | (WITHOUT_RUN if "ends" in name else set())
    for about in sorted((before - after).keys(), key=repr):
        if about[0] not in ignored:
            yield f"missing: {about}"
    for about in sorted((after - before).keys(), key=repr):
        if about[0] not in ignored:
            yield f"extra: {about}"
    current = Counter(incident.kind for incident in plain.incidents.values() if incident.resolved_at is None)
    for incident in other.incidents.values():
        left = incident.resolved_at is None and incident.kind not in ignored and not incident.cause
        if left and not current[incident.kind]:
            yield f"left {incident.state}: {_about(incident)}"
        elif left and "ends" in name and incident.kind in OF_RUNS:
            yield f"left {incident.state} without its run: {_about(incident)}"
    for kind, pages in (_pages(other) - _pages(plain)).items():
        if kind not in ignored:
            yield f"told {pages} more times: {kind}"


def _about(incident: Incident) -> tuple[object, ...]:
    culprit = incident.culprit
    return incident.kind, incident.key, culprit.component, culprit.gpu, culprit.rank, incident.job


def _pages(played: PlayedScenario) -> Counter[str]:
    """How often a person was told, by kind."""
    return Counter(played.incidents[id].kind for _, id, action in played.actions if action.verb == "notify")


def _last_opened(scenario: Scenario, played: PlayedScenario) -> float:
    last = max((m.t + m.every * (m.times - 1) for m in scenario.at), default=0.0)
    return max(played.opened.values(), default=min(last, scenario.duration))


def _with(scenario: Scenario, *moments: Moment) -> Scenario:
    end = max(scenario.duration, *(moment.t + AFTER_S for moment in moments))
    return scenario.model_copy(update={"at": (*scenario.at, *moments), "duration": end})


def _finished(scenario: Scenario, second: float) -> Scenario | None:
    """``scenario`` with the end of its run at ``second``; None if the run does not live until then."""
    ends = any(moment.finish or moment.launcher == "dead" for moment in scenario.at)
    if ends or not scenario.job.launcher or not scenario.job.ranks:
        return None
    return _with(scenario, Moment(t=second, finish=True))
