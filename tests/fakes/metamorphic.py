"""Transformations of a scenario that must not matter, and what differs nevertheless.

Each is a plain function of a scenario, of how it was played undisturbed, and of a source of chance; None where it has
no meaning. ``differences`` compares the incidents: kind, key, culprit and job, each once, and nothing left open.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from opsd.agent.lifecycle import UNPROVEN_S
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Incident
from opsd.scenarios.model import Course, Mode, Moment, Scenario, Value
from opsd.scenarios.player import PlayedScenario, play

HOUR_S = 3600.0
BLIND_S = 20.0
LATE_S = 60.0
_SELECTED = re.compile(r"(\bgpu=)(\d+)")
_ADDRESS = re.compile(r"\b([1-9a-f])(a:00)", re.IGNORECASE)
_PROCESS = re.compile(r"(\b10[1-9]0)(\d)\b")
"""How series, PCI addresses and processes of the simulated node name a GPU or a rank.

Series with a rank are those that only the first rank writes.
"""
IDLE: Mapping[str, Value] = {
    "DCGM_FI_DEV_POWER_USAGE": 71.0,
    "DCGM_FI_DEV_SM_CLOCK": 345.0,
    "opsd_gpu_throttle_seconds_total": Course(rate=0.0),
}
"""Series of all GPUs once nothing runs on them."""
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


def idle_afterwards(scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """The run ends while the incident is open, and the GPUs need little power and are not throttled any more."""
    second = _last_opened(scenario, played) + 4.0
    ended = _finished(scenario, second)
    return ended and _with(ended, Moment(t=second, set=dict(IDLE if scenario.gpus else {})))


def reboots(scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """The node is booted while the incident is open."""
    if any(moment.reboot or moment.finish for moment in scenario.at):
        return None
    second = _last_opened(scenario, played) + 2.5
    changed = _with(scenario, Moment(t=second, reboot=True), Moment(t=second, set=dict(IDLE if scenario.gpus else {})))
    return changed.model_copy(update={"duration": changed.duration + UNPROVEN_S})


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


def agent_killed(scenario: Scenario, played: PlayedScenario, rng: random.Random) -> Scenario | None:
    """The agent is killed at some instant after the first incident opened."""
    first = min(played.opened.values(), default=scenario.duration / 2)
    return _with(scenario, Moment(t=rng.uniform(first + 1.0, scenario.duration), agent_killed=True))


def events_late(scenario: Scenario, _played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """What launcher and ranks write reaches the agent a minute late."""
    if not scenario.job.ranks:
        return None
    changed = _with(scenario, Moment(t=0.0, late=LATE_S))
    return changed.model_copy(update={"duration": changed.duration + LATE_S})


def another_rank(scenario: Scenario, _played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """All that is said of rank and GPU i is said of the next one."""
    if scenario.job.ranks < 2 or scenario.job.ranks > scenario.gpus or any(moment.event for moment in scenario.at):
        return None
    ahead = partial(_ahead, scenario.job.ranks)
    return scenario.model_copy(
        update={
            "at": tuple(_turned(moment, ahead) for moment in scenario.at),
            "on": tuple(_turned(reaction, ahead) for reaction in scenario.on),
        }
    )


def clock_steps(step_s: float, scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """The wall clock is stepped by ``step_s`` while the incident is open."""
    return _with(scenario, Moment(t=_last_opened(scenario, played) + 2.5, clock=step_s))


def events_twice(scenario: Scenario, played: PlayedScenario, _rng: random.Random) -> Scenario | None:
    """The run's event files are replaced, as by a restored folder, so that each event is read a second time."""
    return _with(scenario, Moment(t=_last_opened(scenario, played) + 2.5, read_again=True))


def collector_blind_early(
    collector: str, scenario: Scenario, played: PlayedScenario, rng: random.Random
) -> Scenario | None:
    """A collector fails for 20 s, from some instant between the fault and the incident."""
    if not played.opened or any(collector in (*m.blind, *m.hung, *m.sighted) for m in scenario.at):
        return None
    begin = rng.uniform(min(m.t for m in scenario.at), min(played.opened.values())) if scenario.at else 0.0
    changed = _with(scenario, Moment(t=begin, blind=(collector,)), Moment(t=begin + BLIND_S, sighted=(collector,)))
    return changed.model_copy(update={"duration": changed.duration + 3 * BLIND_S})


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
    "ranks blind early": partial(collector_blind_early, "ranks"),
    "nvml blind early": partial(collector_blind_early, "nvml"),
    "kmsg blind early": partial(collector_blind_early, "kmsg"),
    "host blind early": partial(collector_blind_early, "host"),
    "agent killed": agent_killed,
    "ends, GPUs idle": idle_afterwards,
    "ends, node boots": reboots,
    "events late": events_late,
    "another rank": another_rank,
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
    turned = partial(_ahead, scenario.job.ranks) if name == "another rank" else None
    before = Counter(_about(incident, turned) for incident in plain.incidents.values())
    after = Counter(_about(incident, turned and _unchanged) for incident in other.incidents.values())
    ignored = {*scenario.allow} | (CLOCK if "clock" in name else set()) | (WITHOUT_RUN if "ends" in name else set())
    unseen_s = LATE_S if name == "events late" else BLIND_S if name.endswith("blind early") else 0.0
    brief = {_about(incident, turned) for incident in plain.incidents.values() if over_within(unseen_s, incident)}
    for about in sorted((before - after).keys() - brief, key=repr):
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


def over_within(seconds: float, incident: Incident) -> bool:
    """Whether it was over before somebody who saw nothing for ``seconds`` could see it: nobody need be told of it."""
    return incident.resolved_at is not None and incident.resolved_at - incident.opened_at < seconds


Turn = Callable[[int], int]


def _about(incident: Incident, turn: Turn | None = None) -> tuple[object, ...]:
    culprit = incident.culprit
    if turn is None:
        return incident.kind, incident.key, culprit.component, culprit.gpu, culprit.rank, incident.job
    gpu, rank = (None if value is None else turn(value) for value in (culprit.gpu, culprit.rank))
    return incident.kind, culprit.component, gpu, rank, incident.job


def _unchanged(index: int) -> int:
    return index


def _ahead(ranks: int, index: int) -> int:
    return (index + 1) % ranks if index < ranks else index


def _turned(change: Any, turn: Turn) -> Any:
    """``change`` with each GPU, rank, PCI address and process by ``turn``."""
    moved: dict[str, object] = {"gpu": change.gpu if change.gpu is None else turn(change.gpu)}
    moved["ranks"] = change.ranks if change.ranks is None else tuple(map(turn, change.ranks))
    moved["set"] = {_SELECTED.sub(lambda m: m[1] + str(turn(int(m[2]))), k): v for k, v in change.set.items()}
    lines = (_ADDRESS.sub(lambda m: f"{turn(int(m[1], 16) - 1) + 1:x}{m[2]}", line) for line in change.kernel)
    moved["kernel"] = tuple(_PROCESS.sub(lambda m: m[1] + str(turn(int(m[2]))), line) for line in lines)
    return change.model_copy(update=moved)


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
