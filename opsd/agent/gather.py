"""Run collectors so that none of them can block another one or the loop.

Each collector has its own daemon thread. One that does not return in time is not called again until it does: a driver
call that hangs forever costs only one sleeping thread. One with an attribute ``interval_s`` is not called more often
than that; its last reading stays valid meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from opsd.collectors.base import Collector, NoData, Reading


class Health(StrEnum):
    """The result of a collector's latest collection; ``starting`` until the first one has ended."""

    OK = "ok"
    NO_DATA = "no_data"
    ERROR = "error"
    HUNG = "hung"
    STARTING = "starting"


@dataclass(slots=True)
class Source:
    """What the agent knows of one collector.

    ``fresh``: it delivered in this tick, or its last reading is still valid. Times are monotonic seconds.
    """

    collector: Collector
    health: Health = Health.STARTING
    reason: str = ""
    reading: Reading = field(default_factory=Reading)
    fresh: bool = False
    duration_s: float = 0.0
    errors: int = 0
    succeeded_at: float | None = None

    @property
    def name(self) -> str:
        """The collector's name."""
        return self.collector.name

    def hold(self) -> None:
        """Keep the last reading for another tick, without its events."""
        if self.health is Health.OK and not self.fresh:
            self.reading, self.fresh = replace(self.reading, events=()), True


@dataclass(frozen=True, slots=True)
class _Outcome:
    result: Reading | NoData | BaseException
    started: float
    ended: float


class _Worker:
    """The thread of one collector."""

    def __init__(self, collector: Collector, clock: Callable[[], float], ended: threading.Condition) -> None:
        self._collector = collector
        self._clock = clock
        self._ended = ended
        self._interval_s: float = getattr(collector, "interval_s", 0.0)
        self._due = -math.inf
        self._go = threading.Semaphore(0)
        self.started: float | None = None
        self.outcome: _Outcome | None = None
        threading.Thread(target=self._work, name=f"collect-{collector.name}", daemon=True).start()

    @property
    def busy(self) -> bool:
        return self.started is not None

    @property
    def due(self) -> bool:
        return not self.busy and self._clock() >= self._due

    def start(self) -> None:
        self.started = self._clock()
        self._due = self.started + self._interval_s
        self._go.release()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            started = self._clock()
            try:
                result: Reading | NoData | BaseException = self._collector.collect()
            except BaseException as error:
                # Even SystemExit from a plug-in must not end this thread or the agent.
                result = error
            with self._ended:
                self.outcome = _Outcome(result, started, self._clock())
                self.started = None
                self._ended.notify()


class Gatherer:
    """All collectors of the agent. Used only in the loop's thread."""

    def __init__(self, collectors: Sequence[Collector], *, deadline_s: float, clock: Callable[[], float]) -> None:
        self.sources = tuple(Source(collector) for collector in collectors)
        self._deadline_s = deadline_s
        self._clock = clock
        self._ended = threading.Condition()
        self._workers = tuple(_Worker(collector, clock, self._ended) for collector in collectors)

    def gather(self, patience_s: float) -> tuple[Source, ...]:
        """Collect once from everything that is due, wait at most ``patience_s``, and return the state of all.

        A collector that is still busy is not called again. What it delivers later is used by the next call. One that is
        busy for longer than the deadline counts as hung, and its last reading is dropped.
        """
        until = self._clock() + patience_s
        with self._ended:
            for source, worker in zip(self.sources, self._workers, strict=True):
                source.fresh = False
                self._take(source, worker)
            awaited = [worker for worker in self._workers if worker.due]
            for worker in awaited:
                worker.start()
            while any(worker.busy for worker in awaited) and (left := until - self._clock()) > 0:
                self._ended.wait(left)
            for source, worker in zip(self.sources, self._workers, strict=True):
                self._take(source, worker)
                if not worker.busy and worker not in awaited:
                    source.hold()
        return self.sources

    def _take(self, source: Source, worker: _Worker) -> None:
        outcome, worker.outcome = worker.outcome, None
        if outcome is not None:
            _record(source, outcome)
        elif worker.started is not None and (busy_s := self._clock() - worker.started) > self._deadline_s:
            source.health = Health.HUNG
            source.reason = f"has not returned for more than {self._deadline_s:g} s"
            source.duration_s = busy_s
            source.reading = Reading()


def _record(source: Source, outcome: _Outcome) -> None:
    late = source.reading if source.fresh else None
    result = outcome.result
    source.duration_s = outcome.ended - outcome.started
    if isinstance(result, Reading):
        source.health, source.reason, source.fresh = Health.OK, "", True
        source.succeeded_at = outcome.ended
        # A late reading and this one both belong to this tick; no event may be lost.
        source.reading = result if late is None else replace(result, events=(*late.events, *result.events))
        return
    if isinstance(result, NoData):
        source.health, source.reason = Health.NO_DATA, result.reason
    else:
        source.health, source.reason = Health.ERROR, f"{type(result).__name__}: {result}"
        source.errors += 1
    if late is None:
        source.reading = Reading()
