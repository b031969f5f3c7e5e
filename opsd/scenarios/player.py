"""Play a scenario: the agent's own window, judge and incident manager over a simulated node, with a virtual clock.

Compare what the agent did in a scenario with what was expected.
"""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opsd.agent import metrics
from opsd.agent.actions import Executor, Intended
from opsd.agent.incident_manager import IncidentManager
from opsd.agent.incidents import Transition
from opsd.agent.journal import Journal
from opsd.agent.judge import Judge
from opsd.agent.kept_window import SAVE_S, pack, unpack
from opsd.agent.lifecycle import Outcome
from opsd.agent.logs import Log
from opsd.agent.window import Window
from opsd.collectors import witnesses
from opsd.collectors.base import NoData, Sample
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Action, Incident
from opsd.scenarios.model import Expectation, Mode, Scenario
from opsd.scenarios.node import COLLECTORS, NODE, SimulatedNode
from opsd.settings.policy import PolicySettings


@dataclass
class PlayedScenario:
    """What the agent did in a scenario, in its seconds. ``actions`` were executed; ``errors`` are bugs of the agent."""

    mode: Mode
    opened: dict[str, float] = field(default_factory=dict)
    incidents: dict[str, Incident] = field(default_factory=dict)
    transitions: list[tuple[float, Transition]] = field(default_factory=list)
    actions: list[tuple[float, str, Action]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class _SimulatedExecutor(Executor):
    """Actions end at once, with the result that the scenario says; their effect comes later."""

    def __init__(self, player: _Player) -> None:
        super().__init__(shm=Path("/nonexistent"), notify=lambda _text, _fields: None)
        self._player = player

    def submit(self, incident: str, number: int, action: Action, _intended: Intended) -> None:
        fails = self._player.acted(incident, action)
        self.outcomes.put(Outcome(incident, number, not fails, fails or "done"))


Looked = Callable[[Sequence[Incident], Sequence[Sequence[Sample]]], None]


class _Player:
    def __init__(self, scenario: Scenario, mode: Mode, look_s: float, looked: Looked | None) -> None:
        self.played = PlayedScenario(mode)
        self._scenario, self._look_s, self._looked = scenario, look_s, looked
        self._collected: list[Sequence[Sample]] = []
        self._node = SimulatedNode(scenario)
        self._order = itertools.count()
        self._agent_restarts = self._agent_killed = False
        self._is_killed = any(moment.agent_killed for moment in scenario.at)
        self._due = [(second, next(self._order), change) for second, change in scenario.moments()]
        heapq.heapify(self._due)

    def acted(self, incident: str, action: Action) -> str:
        """Record an action that the agent executes; returns why it fails, or ""."""
        self.played.actions.append((self._node.second, incident, action))
        reactions = [reaction for reaction in self._scenario.on if reaction.action == action.verb]
        for reaction in reactions:
            heapq.heappush(self._due, (self._node.second + reaction.after, next(self._order), reaction))
        return next((reaction.fails for reaction in reactions if reaction.fails), "")

    def play(self) -> PlayedScenario:
        with tempfile.TemporaryDirectory(prefix="opsd-scenario-") as folder:
            journal, window, incident_manager = self._agent(Path(folder))
            saved = b""
            for look in range(int(self._scenario.duration / self._look_s) + 1):
                stepped = self._go_to(look * self._look_s)
                if stepped:
                    window.clock_stepped(stepped)
                    incident_manager.clock_stepped(stepped)
                if self._agent_restarts or self._agent_killed:
                    journal.window(saved if self._agent_killed else pack(window))
                    journal.close()
                    self._agent_restarts = self._agent_killed = False
                    self._keep(incident_manager)
                    self._node.job.read_again()
                    journal, window, incident_manager = self._agent(Path(folder))
                self._look(window)
                incident_manager.respond(window)
                if self._is_killed and look * self._look_s % SAVE_S < self._look_s:
                    saved = pack(window)
                if self._looked is not None:
                    self._looked(incident_manager.current, self._exported(incident_manager))
            journal.close()
        self._keep(incident_manager)
        return self.played

    def _agent(self, folder: Path) -> tuple[Journal, Window, IncidentManager]:
        """An agent that has just started, with what the journal in ``folder`` remembers."""
        journal = Journal(folder, lambda _problem: None, boot=str(self._node.boot))
        incident_manager = self._incident_manager(journal)
        window = Window(NODE, interval_s=self._look_s, witnesses=witnesses())
        if incident_manager.kept_window:
            window.go_on(unpack(incident_manager.kept_window, window.ticks, self._node.now))
        return journal, window, incident_manager

    def _keep(self, incident_manager: IncidentManager) -> None:
        for incident in (*incident_manager.ended, *incident_manager.current):
            self.played.incidents[incident.id] = incident

    def _look(self, window: Window) -> None:
        window.begin(self._node.now, self._node.wall)
        health = self._node.health()
        window.add("agent", health)
        self._collected = [health.samples]
        for collector in COLLECTORS:
            reading = self._node.read(collector)
            if isinstance(reading, NoData):
                window.forget(collector)
            else:
                window.add(collector, reading)
                self._collected.append(reading.samples)

    def _exported(self, incident_manager: IncidentManager) -> Sequence[Sequence[Sample]]:
        """What a scrape would get now."""
        kinds = [book.kind for book in RUNBOOKS]
        return [
            metrics.runbook_samples(kinds, incident_manager.current, incident_manager.opened, {}),
            metrics.cost_samples(kinds, incident_manager.cost),
            metrics.action_samples(incident_manager.actions),
            *self._collected,
        ]

    def _incident_manager(self, journal: Journal) -> IncidentManager:
        log = Log(self._logged)
        return IncidentManager(
            Judge(RUNBOOKS, log, used_s=lambda: 0.0),
            _SimulatedExecutor(self),
            journal,
            log,
            policy=PolicySettings(mode=self.played.mode),
            started_at=self._node.wall,
            listeners=[self._heard],
        )

    def _logged(self, event: Mapping[str, object]) -> None:
        """Keep what the agent logs as an error (a runbook that raised)."""
        if event["level"] == "error":
            self.played.errors.append(f"{event['event']}: {event.get('exception', '')}")

    def _heard(self, incident: Incident, transition: Transition) -> None:
        if transition.before is None:
            self.played.opened[incident.id] = self._node.second
        self.played.transitions.append((self._node.second, transition))

    def _go_to(self, second: float) -> float:
        """Process everything up to ``second``; returns by how much the wall clock was stepped meanwhile."""
        stepped = 0.0
        while self._due and self._due[0][0] <= second:
            at, _, change = heapq.heappop(self._due)
            self._node.advance(max(at, self._node.second))
            self._node.apply(change)
            stepped += change.clock
            self._agent_restarts |= change.agent_restart or change.reboot
            self._agent_killed |= change.agent_killed
        self._node.advance(second)
        return stepped


def play(scenario: Scenario, mode: Mode, look_s: float = 1.0, looked: Looked | None = None) -> PlayedScenario:
    """Play ``scenario`` once, in real code and virtual time; the agent looks every ``look_s`` seconds.

    After each look ``looked`` gets the incidents that are not over, and the samples that the agent exports. Raises
    ScenarioError for a series that does not exist.
    """
    return _Player(scenario, mode, look_s, looked).play()


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
