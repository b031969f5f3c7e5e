"""Run collectors so that none of them can block another one or the loop.

Each collector has its own daemon thread. One that does not return in time is not called again until it does: a driver
call that hangs forever costs only one sleeping thread. One with an attribute ``interval_s`` is not called more often
than that; its last reading stays valid meanwhile. A collector that takes too much processor time waits longer
(``taken_s`` is the time of its own threads so far). Samples and events of a reading are limited, so that users of a
node cannot raise the cost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from opsd.collectors.base import Collector, NoData, Reading, Supplementary

CPU_SHARE: Final = 0.1
CPU_BURST_S: Final = 2.0
"""Share of a core that a collector may take, and seconds of processor time that it may take at once."""
MAX_SAMPLES: Final = 20_000
MAX_EVENTS: Final = 5_000
"""Samples and events of a reading; further ones are left out."""
LIMITED_S: Final = 30.0
"""A collector counts as limited for this long, so that a limit that bites now and then is one line in the log."""


class Health(StrEnum):
    """The result of a collector's latest collection; ``starting`` until the first one has ended.

    ``limited`` is ``ok``, but that a limit has left something out, or has it collect less often.
    """

    OK = "ok"
    LIMITED = "limited"
    NO_DATA = "no_data"
    ERROR = "error"
    HUNG = "hung"
    STARTING = "starting"

    @property
    def delivers(self) -> bool:
        """True if its reading counts."""
        return self in (Health.OK, Health.LIMITED)


@dataclass(slots=True)
class Source:
    """What the agent knows of one collector.

    ``fresh``: it delivered in this tick, or its last reading is still valid. ``limit`` is what a limit left out last.
    Times are monotonic seconds.
    """

    collector: Collector
    health: Health = Health.STARTING
    reason: str = ""
    reading: Reading = field(default_factory=Reading)
    fresh: bool = False
    duration_s: float = 0.0
    errors: int = 0
    succeeded_at: float | None = None
    limited_at: float = -math.inf
    limit: str = ""

    @property
    def name(self) -> str:
        """The collector's name."""
        return self.collector.name

    def hold(self) -> None:
        """Keep the last reading for another tick, without its events."""
        if self.health.delivers and not self.fresh:
            self.reading, self.fresh = replace(self.reading, events=()), True


@dataclass(frozen=True, slots=True)
class _Outcome:
    """``waits_s`` is how long the collector has to wait because of the processor time that it took."""

    result: Reading | NoData | BaseException
    started: float
    ended: float
    waits_s: float


class _Worker:
    """The thread of one collector. It leaves ``awaited`` after a collection; the last to leave notifies ``ended``."""

    def __init__(
        self, collector: Collector, clock: Callable[[], float], ended: threading.Condition, awaited: set[_Worker]
    ) -> None:
        self._collector = collector
        self._clock = clock
        self._ended, self._awaited = ended, awaited
        self._interval_s: float = getattr(collector, "interval_s", 0.0)
        self._due = -math.inf
        self._credit_s, self._credited = CPU_BURST_S, clock()
        self._go = threading.Semaphore(0)
        self._stopped = False
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

    def stop(self) -> None:
        """End the thread once the collector has returned."""
        self._stopped = True
        self._go.release()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._stopped:
                return
            started, used = self._clock(), self._taken()
            try:
                result: Reading | NoData | BaseException = self._collector.collect()
            except BaseException as error:
                # Even SystemExit from a plug-in must not end this thread or the agent.
                result = error
            ended, used = self._clock(), self._taken() - used
            with self._ended:
                waits_s = self._charge(used, ended)
                self._due = max(self._due, ended + waits_s)
                self.outcome = _Outcome(result, started, ended, waits_s)
                self.started = None
                self._awaited.discard(self)
                if not self._awaited:
                    self._ended.notify()

    def _taken(self) -> float:
        own: float = getattr(self._collector, "taken_s", 0.0)
        return time.thread_time() + own

    def _charge(self, used_s: float, now: float) -> float:
        """Take in the processor time of a collection that has ended; the seconds until the next one may begin."""
        earned = (now - self._credited) * CPU_SHARE
        self._credit_s, self._credited = min(CPU_BURST_S, self._credit_s + earned) - used_s, now
        return max(0.0, -self._credit_s / CPU_SHARE)


class Gatherer:
    """All collectors of the agent. Used only in the loop's thread."""

    def __init__(self, collectors: Sequence[Collector], *, deadline_s: float, clock: Callable[[], float]) -> None:
        self.sources = tuple(Source(collector) for collector in collectors)
        self._supplementary = [(s, s.collector) for s in self.sources if isinstance(s.collector, Supplementary)]
        self._deadline_s = deadline_s
        self._clock = clock
        self._ended, self._awaited = threading.Condition(), set[_Worker]()
        self._workers = tuple(_Worker(collector, clock, self._ended, self._awaited) for collector in collectors)

    def gather(self, patience_s: float) -> tuple[Source, ...]:
        """Collect once from everything that is due, wait at most ``patience_s``, and return the state of all.

        A collector that is still busy is not called again. A late result is used by the next call. One that is
        busy for longer than the deadline counts as hung, and its last reading is dropped.
        """
        until = self._clock() + patience_s
        with self._ended:
            for source, worker in zip(self.sources, self._workers, strict=True):
                source.fresh = False
                self._take(source, worker)
            due = {worker for worker in self._workers if worker.due}
            self._awaited.update(due)
            for worker in due:
                worker.start()
            while self._awaited and (left := until - self._clock()) > 0:
                self._ended.wait(left)
            self._awaited.clear()
            for source, worker in zip(self.sources, self._workers, strict=True):
                self._take(source, worker)
                if not worker.busy and worker not in due:
                    source.hold()
        self._merge()
        return self.sources

    def _merge(self) -> None:
        """Leave of supplementary readings what they add, in this tick, to those that they are supplementary to."""
        for source, collector in self._supplementary:
            if source.health.delivers:
                other = next((one.reading for one in self.sources if one.name == collector.yields_to), Reading())
                source.reading, wrong = collector.beside(source.reading, other)
                source.reason = source.reason if source.health is Health.LIMITED else wrong

    def close(self) -> None:
        """Collect no more."""
        for worker in self._workers:
            worker.stop()

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
        result = _limited(result, outcome.waits_s)
        if result.limited:
            source.limited_at, source.limit = outcome.ended, result.limited
        limited = outcome.ended - source.limited_at < LIMITED_S
        source.health = Health.LIMITED if limited else Health.OK
        source.reason, source.fresh = source.limit if limited else "", True
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


def _limited(reading: Reading, waits_s: float) -> Reading:
    """``reading`` without what is too much, and what to say about that."""
    samples, events = len(reading.samples) - MAX_SAMPLES, len(reading.events) - MAX_EVENTS
    said = [
        reading.limited,
        f"{samples} samples left out" if samples > 0 else "",
        f"{events} events left out" if events > 0 else "",
        f"it took too much processor time and pauses for {waits_s:.0f} s" if waits_s > 1.0 else "",
    ]
    limited = "; ".join(filter(None, said))
    if samples <= 0 and events <= 0 and limited == reading.limited:
        return reading
    return replace(reading, samples=reading.samples[:MAX_SAMPLES], events=reading.events[-MAX_EVENTS:], limited=limited)
