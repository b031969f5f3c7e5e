"""The agent's loop: collect, judge, decide, act, record, publish; once a second, on absolute ticks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from structlog.typing import FilteringBoundLogger

from collectors.base import Collector, GpuFact, RankFact, RunFact, Sample
from opsd.agent import incidents, metrics
from opsd.agent.actions import Executor
from opsd.agent.gather import Gatherer, Health, Source
from opsd.agent.journal import MAX_ENDED, Journal
from opsd.agent.judge import Judge
from opsd.agent.policy import Decision, Limits, Past, Verdict, decide
from opsd.agent.window import Window
from runbooks.base import Action, Incident, Runbook, State

PATIENCE = 0.5
"""Share of a tick that the loop waits for collectors; what comes later is taken in by the next tick."""
CLOCK_STEP_S = 1.0
"""A jump of the wall clock against the monotonic one that is a step and not drift."""
REWRITE_S = 30.0
"""An incident that only goes on is written to the journal this often."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Monotonic and epoch seconds."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Options:
    """What the loop needs of the settings. ``mode_of`` gives the policy mode of a kind of incident."""

    node: str
    interval_s: float = 1.0
    deadline_s: float = 2.0
    window_s: float = 600.0
    mode_of: Callable[[str], str] = lambda _kind: "observe"
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the agent knew at the end of a tick; everything outside the loop reads this and nothing else.

    ``at`` is monotonic, ``wall`` epoch seconds. ``ended`` has the newest ended incidents first.
    """

    tick: int
    at: float
    wall: float
    sources: tuple[Source, ...] = ()
    samples: tuple[Sequence[Sample], ...] = ()
    incidents: tuple[Incident, ...] = ()
    ended: tuple[Incident, ...] = ()
    gpus: Sequence[GpuFact] = ()
    ranks: Sequence[RankFact] = ()
    runs: Sequence[RunFact] = ()
    journal_problem: str = ""


class Loop:
    """The agent without its HTTP server. ``tick`` and ``run`` belong to one thread; any may read ``snapshot``."""

    def __init__(
        self,
        options: Options,
        collectors: Sequence[Collector],
        runbooks: Sequence[Runbook],
        executor: Executor,
        journal: Journal,
        log: FilteringBoundLogger,
        *,
        listeners: Sequence[Callable[[Incident, incidents.Transition], None]] = (),
        clock: Clock = Clock(),
    ) -> None:
        self._options, self._executor, self._journal, self._log = options, executor, journal, log
        self._listeners, self._clock = listeners, clock
        self._gatherer = Gatherer(collectors, deadline_s=options.deadline_s, clock=clock.monotonic)
        self._judge = Judge(runbooks, log)
        self._window = Window(options.node, seconds=options.window_s, interval_s=options.interval_s)
        self._counts = metrics.Counts(runbook_errors=self._judge.errors)
        self.started_at = clock.wall()
        self._wall_of_zero = self.started_at - clock.monotonic()
        self._written: dict[str, tuple[Incident, float]] = {}
        self._healths: dict[str, Health] = {}
        memory = journal.open()
        self._book = incidents.Book({(i.kind, i.key): incidents.resumed(i, self.started_at) for i in memory.current})
        self._ended: deque[Incident] = deque(memory.ended, maxlen=MAX_ENDED)
        self._history: list[Past] = list(memory.actions)
        self.snapshot = Snapshot(-1, clock.monotonic(), self.started_at)

    def run(self, stop: threading.Event, after_tick: Callable[[], None] = lambda: None) -> None:
        """Tick until ``stop`` is set, on a fixed grid; ticks that could not be kept are left out and counted."""
        interval = self._options.interval_s
        origin, number = self._clock.monotonic(), 0
        while not stop.is_set():
            self.tick()
            after_tick()
            due = int((self._clock.monotonic() - origin) / interval) + 1
            self._counts.missed += due - number - 1
            number = due
            stop.wait(origin + number * interval - self._clock.monotonic())

    def tick(self) -> None:
        """One round of everything."""
        began = self._clock.monotonic()
        sources = self._gatherer.gather(PATIENCE * self._options.interval_s)
        now, wall = self._clock.monotonic(), self._clock.wall()
        self._allow_for_clock_step(wall - now)
        self._look(sources, now, wall)
        self._think(wall)
        self._counts.ticks += 1
        self._publish(sources, began, wall)

    def _allow_for_clock_step(self, wall_of_zero: float) -> None:
        step, self._wall_of_zero = wall_of_zero - self._wall_of_zero, wall_of_zero
        if abs(step) > CLOCK_STEP_S:
            self._log.warning("the wall clock was stepped", seconds=round(step, 3))
            self._book = incidents.shifted(self._book, step)
            self.started_at += step

    def _look(self, sources: Sequence[Source], now: float, wall: float) -> None:
        self._window.begin(now, wall)
        for source in sources:
            if source.fresh:
                self._window.add(source.name, source.reading)
            elif source.health is not Health.OK:
                self._window.forget(source.name)
            if self._healths.get(source.name) is not source.health:
                self._healths[source.name] = source.health
                self._log.info("collector", collector=source.name, state=source.health.value, reason=source.reason)

    def _think(self, wall: float) -> None:
        view, current = self._window, list(self._book.incidents.values())
        remedies = self._judge.remedies([i for i in current if i.state is State.OPEN], view)
        observed = incidents.Observed(
            findings=self._judge.findings(view),
            healed=self._judge.healed(current, view),
            idle=frozenset(id for id, actions in remedies.items() if not actions),
            outcomes=self._outcomes(),
        )
        self._book, ended, transitions = incidents.reduce(self._book, observed, self._judge.rules, wall)
        by_id = {incident.id: incident for incident in (*self._book.incidents.values(), *ended)}
        for incident in ended:
            self._ended.appendleft(incident)
            self._record(incident, wall)
        for transition in transitions:
            self._tell(by_id[transition.incident], transition)
        self._act(wall)
        for incident in self._book.incidents.values():
            self._record(incident, wall)

    def _outcomes(self) -> list[incidents.Outcome]:
        verbs = {(i.id, n): str(a["verb"]) for i in self._book.incidents.values() for n, a in enumerate(i.actions)}
        outcomes = []
        while not self._executor.outcomes.empty():
            outcome = self._executor.outcomes.get()
            verb = verbs.get((outcome.incident, outcome.number), "unknown")
            self._counts.actions[verb, "ok" if outcome.ok else "failed"] += 1
            self._log.info("action ended", incident=outcome.incident, verb=verb, ok=outcome.ok, detail=outcome.detail)
            outcomes.append(outcome)
        return outcomes

    def _act(self, wall: float) -> None:
        """Decide about every open incident and set in motion what the policy admits."""
        waiting = [incident for incident in self._book.incidents.values() if incident.state is State.OPEN]
        changed: dict[tuple[str, str], Incident] = {}
        for incident in waiting:
            actions = self._judge.remedies([incident], self._window).get(incident.id, ())
            mode = self._options.mode_of(incident.kind)
            decisions = decide(incident, actions, mode, self._history, self._options.limits, self.started_at, wall)
            after = self._carry_out(incident, decisions, wall)
            if after is not incident:
                changed[incident.kind, incident.key] = after
        self._book = replace(self._book, incidents={**self._book.incidents, **changed})

    def _carry_out(self, incident: Incident, decisions: Sequence[Decision], wall: float) -> Incident:
        said = [_recorded(d.action, d.verdict, d.reason, wall) for d in decisions if d.verdict is not Verdict.RUN]
        after = incidents.noted(incident, said)
        for note in after.actions[len(incident.actions) :]:
            self._counts.actions[str(note["verb"]), str(note["outcome"])] += 1
            self._log.info("action not taken", incident=incident.id, verb=note["verb"], outcome=note["outcome"],
                           reason=note["detail"])  # fmt: skip
        admitted = [decision.action for decision in decisions if decision.verdict is Verdict.RUN]
        if not admitted:
            return after
        first = len(after.actions)
        after = incidents.started(after, [_recorded(action, "running", "", wall) for action in admitted], wall)
        self._record(after, wall)
        self._journal.transition(
            incidents.Transition(after.id, after.kind, incident.state, after.state, wall, f"attempt {after.attempts}")
        )
        for number, action in enumerate(admitted, first):
            past = Past(incident.kind, action.verb, action.target, wall)
            self._history.append(past)
            self._journal.action(incident.id, past)
            self._log.warning(
                "acting", incident=incident.id, verb=action.verb, target=action.target, reason=action.reason
            )
            self._executor.submit(incident.id, number, action)
        return after

    def _tell(self, incident: Incident, transition: incidents.Transition) -> None:
        if transition.before is None:
            self._counts.opened[incident.kind] += 1
        self._journal.transition(transition)
        self._log.warning(
            "incident", id=incident.id, state=transition.after.value, severity=incident.severity.value,
            culprit=str(incident.culprit), text=transition.text,
        )  # fmt: skip
        for listener in self._listeners:
            listener(incident, transition)

    def _record(self, incident: Incident, wall: float) -> None:
        """Write the incident to the journal if something besides its times has changed, or from time to time."""
        if not incidents.is_current(incident):
            self._written.pop(incident.id, None)
            self._journal.incident(incident)
            return
        before, at = self._written.get(incident.id, (None, 0.0))
        if before is None or _essence(before) != _essence(incident) or wall - at >= REWRITE_S:
            self._written[incident.id] = (incident, wall)
            self._journal.incident(incident)

    def _publish(self, sources: tuple[Source, ...], began: float, wall: float) -> None:
        current = tuple(self._book.incidents.values())
        counts, journal = self._counts, self._journal
        self._history = [past for past in self._history if wall - past.at < 86_400.0]
        own = [
            *metrics.agent_samples(counts, self._clock.monotonic() - began, len(self._window)),
            *metrics.collector_samples(sources, self._wall_of_zero),
            *metrics.journal_samples(journal.problem, journal.backlog, journal.lost),
            *metrics.incident_samples(current, list(self._judge.runbooks), counts),
        ]
        self.snapshot = Snapshot(
            tick=self._window.tick,
            at=self._clock.monotonic(),
            wall=wall,
            sources=tuple(replace(source) for source in sources),
            samples=(own, *(source.reading.samples for source in sources)),
            incidents=current,
            ended=tuple(self._ended),
            gpus=self._window.gpus,
            ranks=self._window.ranks,
            runs=self._window.runs,
            journal_problem=journal.problem,
        )


def _recorded(action: Action, outcome: str, detail: str, at: float) -> Mapping[str, object]:
    """An action as it stands in ``Incident.actions``."""
    return {
        "verb": action.verb,
        "target": action.target,
        "args": dict(action.args),
        "reason": action.reason,
        "at": at,
        "outcome": str(outcome),
        "detail": detail,
    }


def _essence(incident: Incident) -> Incident:
    return replace(incident, last_seen_at=0.0, cost=incidents.NO_COST, evidence=incident.evidence[:1], summary="")
