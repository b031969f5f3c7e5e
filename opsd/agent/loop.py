"""The agent's loop: collect, respond, publish; once a second, on absolute ticks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from opsd.agent import metrics
from opsd.agent.gather import Gatherer, Health, Source
from opsd.agent.incident_manager import IncidentManager
from opsd.agent.journal import Journal
from opsd.agent.judge import Judge
from opsd.agent.kept_window import SavedWindow, pack
from opsd.agent.logs import Log
from opsd.agent.window import Window
from opsd.collectors.base import Collector, GpuFact, RankFact, Reading, RepairFact, RunFact, Sample
from opsd.runbooks.base import Incident

PATIENCE = 0.5
"""Share of a tick that the loop waits for collectors; later readings are used in the next tick."""
SECOND_LOOK_S = 0.1
"""Seconds from the first tick to the second, so that values that need two readings (rates, shares) come early."""
_TROUBLE = (Health.ERROR, Health.HUNG, Health.LIMITED)
CLOCK_STEP_S = 1.0
"""A difference of wall clock and monotonic clock above this is a step and not drift."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Monotonic and epoch seconds."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The agent's state at the end of a tick; everything outside the loop reads only this.

    ``at`` is in monotonic, ``wall`` in epoch seconds. ``ended`` has the most recently ended incident first,
    ``repairs`` the oldest. ``mode_of`` is the policy's mode by kind of incident.
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
    repairs: Sequence[RepairFact] = ()
    journal_problem: str = ""
    mode_of: Callable[[str], str] = lambda _kind: "observe"

    def select(self, *metrics: str) -> Iterator[Sample]:
        """Every sample of these metrics."""
        return (sample for group in self.samples for sample in group if sample.metric.name in metrics)

    def value(self, metric: str) -> float | None:
        """The value of a metric without labels, None without one."""
        return next((sample.value for sample in self.select(metric)), None)


class Loop:
    """The agent without its HTTP server. ``tick`` and ``run`` belong to one thread; any may read ``snapshot``."""

    def __init__(
        self,
        window: Window,
        collectors: Sequence[Collector],
        judge: Judge,
        incident_manager: IncidentManager,
        journal: Journal,
        log: Log,
        *,
        interval_s: float = 1.0,
        deadline_s: float = 2.0,
        clock: Clock = Clock(),
        saved: SavedWindow | None = None,
    ) -> None:
        self._window, self._judge, self._incident_manager, self._journal = window, judge, incident_manager, journal
        self._log, self._interval_s, self._clock, self._saved = log, interval_s, clock, saved
        self._gather = partial(Gatherer, deadline_s=deadline_s, clock=clock.monotonic)
        self._gatherer = self._gather(collectors)
        self._healths: dict[str, tuple[Health, str]] = {}
        self._wall_of_zero = clock.wall() - clock.monotonic()
        self._collectors: tuple[Sample, ...] = ()
        self._ticks = self._missed = 0
        self.snapshot = Snapshot(-1, clock.monotonic(), clock.wall())
        self.others: list[Callable[[], Iterable[Sample]]] = []
        """Samples of other parts of the agent; called once a tick."""

    def run(self, stop: threading.Event, after_tick: Callable[[], None] = lambda: None) -> None:
        """Tick until ``stop`` is set, on a fixed grid; missed ticks are skipped and counted."""
        self.tick()
        after_tick()
        stop.wait(min(SECOND_LOOK_S, self._interval_s))
        origin, number = self._clock.monotonic(), 0
        while not stop.is_set():
            self.tick()
            after_tick()
            due = int((self._clock.monotonic() - origin) / self._interval_s) + 1
            self._missed += due - number - 1
            number = due
            stop.wait(origin + number * self._interval_s - self._clock.monotonic())

    def replace_collectors(self, collectors: Sequence[Collector]) -> None:
        """Collect from these from now on. Data of collectors with the same names stay in the window."""
        gone = {source.name for source in self._gatherer.sources} - {collector.name for collector in collectors}
        self._gatherer.close()
        self._gatherer = self._gather(collectors)
        for name in gone:
            self._window.forget(name)
            self._healths.pop(name, None)

    def replace_judge(self, judge: Judge) -> None:
        """Judge by this one from now on; the counters stay."""
        judge.errors = self._judge.errors
        self._judge = judge

    def keep_window(self) -> None:
        """Record the window for the next agent."""
        self._journal.window(pack(self._window))

    def _save_window(self) -> None:
        if self._saved is not None:
            try:
                self._saved.save(self._window)
            except OSError as error:
                self._log.warning("the window is not saved for an agent after this one", reason=error.strerror)
                self._saved = None

    def tick(self) -> None:
        """One round of everything."""
        began = self._clock.monotonic()
        sources = self._gatherer.gather(PATIENCE * self._interval_s)
        now, wall = self._clock.monotonic(), self._clock.wall()
        self._allow_for_clock_step(wall - now)
        self._take_in(sources, now, wall)
        self._incident_manager.respond(self._window)
        self._ticks += 1
        self._save_window()
        self._publish(sources, began)

    def _allow_for_clock_step(self, wall_of_zero: float) -> None:
        step, self._wall_of_zero = wall_of_zero - self._wall_of_zero, wall_of_zero
        if abs(step) > CLOCK_STEP_S:
            self._log.warning("the wall clock was stepped", seconds=round(step, 3))
            self._window.clock_stepped(step)
            self._incident_manager.clock_stepped(step)

    def _take_in(self, sources: Sequence[Source], now: float, wall: float) -> None:
        self._window.begin(now, wall)
        for source in sources:
            if source.fresh:
                self._window.add(source.name, source.reading)
            elif not source.health.delivers:
                self._window.forget(source.name)
            wrong = source.reason if source.health is Health.OK else ""
            if self._healths.get(source.name) != (source.health, wrong):
                self._healths[source.name] = source.health, wrong
                say = self._log.warning if wrong or source.health in _TROUBLE else self._log.info
                say("collector", collector=source.name, state=source.health.value, reason=source.reason)
        self._collectors = tuple(metrics.collector_samples(sources, self._wall_of_zero))
        self._window.add("agent", Reading(self._collectors))

    def _publish(self, sources: tuple[Source, ...], began: float) -> None:
        at = self._clock.monotonic()
        self.snapshot = Snapshot(
            tick=self._window.tick,
            at=at,
            wall=self._window.wall,
            sources=tuple(replace(source) for source in sources),
            samples=(*self._own(at - began), *(source.reading.samples for source in sources)),
            incidents=self._incident_manager.current,
            ended=tuple(self._incident_manager.ended),
            gpus=self._window.gpus,
            ranks=self._window.ranks,
            runs=self._window.runs,
            repairs=self._incident_manager.repairs.shown,
            journal_problem=self._journal.problem,
            mode_of=self._incident_manager.policy.mode_of,
        )

    def _own(self, tick_s: float) -> Iterator[tuple[Sample, ...]]:
        incident_manager, journal, runbooks = self._incident_manager, self._journal, self._judge.runbooks
        yield tuple(metrics.loop_samples(self._ticks, self._missed, tick_s, len(self._window), self._window.refused))
        yield self._collectors
        yield tuple(metrics.journal_samples(journal.problem, journal.backlog, journal.lost))
        yield metrics.runbook_samples(runbooks, incident_manager.current, incident_manager.opened, self._judge.errors)
        yield metrics.cost_samples(runbooks, incident_manager.cost)
        yield metrics.action_samples(incident_manager.actions)
        yield (Sample(metrics.OVER_QUOTA, float(incident_manager.over_quota)),)
        for other in self.others:
            yield tuple(other())
