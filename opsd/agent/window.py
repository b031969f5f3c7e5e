"""The last minutes of every series in memory, and the queries of the runbooks.

Each series is a ring of 32-bit offsets from its own 64-bit base, with a common time axis: 10,000 series of 600 ticks
fit into 30 MiB. The base follows the series, so that differences between samples of the window have a relative
precision of 2**-23 even for large counters; the newest value is kept exactly. A missing sample is a NaN in the ring,
as is one that is no finite number; gaps are filled in only when the series comes back.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, TypeVar, cast

from opsd.agent.kept_window import Past
from opsd.collectors.base import Event, Fact, GpuFact, Metric, RankFact, Reading, RepairFact, RunFact, Sample
from opsd.runbooks.base import Done

F = TypeVar("F", GpuFact, RankFact, RunFact, RepairFact)

MAX_SERIES = 50_000
"""Limit of stored series; further ones are dropped and counted in ``Window.refused``."""

MAX_TOLD_SERIES = 30_000
"""Limit of those among them that no witness tells, so that users and exporters leave room for kernel and drivers."""

MAX_GONE = 4_000
"""Limit of stored series that have no sample any more; those that ended first are dropped."""

PAST_TICKS = 120
"""Ticks after the start in which a series still gets its past back."""

MAX_REBASES = 64
"""Limit of series per collector and tick that get a new base, at 0.1 ms each; the others wait."""

_NAN = math.nan
_FIRST_LIMIT = 2.0**20
_LARGEST = 2.0**127


Family = dict[tuple[str, ...], "Ring"]
Families = dict[str, Family]


class Window:
    """Implements ``runbooks.base.View``. Used in one thread.

    Each tick: ``begin``, then ``add`` for every collector that delivered. What the collectors ``witnesses`` tell, whose
    sources are the kernel and drivers, is kept apart from what exporters and users tell; ``witnessed`` has it alone.
    """

    def __init__(
        self, node: str, *, seconds: float = 600.0, interval_s: float = 1.0, witnesses: Collection[str] = ()
    ) -> None:
        self.node = node
        self.witnesses = frozenset((*witnesses, "agent"))
        self.now = 0.0
        self.wall = 0.0
        self.refused = 0
        self.ticks = math.ceil(seconds / interval_s) + 1
        self.tick = -1
        self.times = array("d", [_NAN]) * self.ticks
        self._witnessed: Families = {}
        self._told: Families = {}
        self._count = self._told_count = self._added = 0
        self._events = EventLog()
        self._holders = Holders()
        self._readings: dict[str, Reading] = {}
        self._kinds: dict[type[Fact], Sequence[Fact]] = {}
        self._done: dict[tuple[str, str], Done] = {}
        self._fresh: set[str] = set()
        self.past: Past | None = None
        self._past_until = 0
        self.news: list[Event] = []
        """Events from witnesses in this tick."""

    @property
    def gpus(self) -> Sequence[GpuFact]:
        """The GPUs of this node as last seen."""
        return self._facts(GpuFact)

    @property
    def ranks(self) -> Sequence[RankFact]:
        """The ranks on this node as last seen."""
        return self._facts(RankFact)

    @property
    def runs(self) -> Sequence[RunFact]:
        """The runs on this node as last seen."""
        return self._facts(RunFact)

    @property
    def repairs(self) -> Sequence[RepairFact]:
        """The repairs of this node that are on record, oldest first."""
        return self._facts(RepairFact)

    def begin(self, now: float, wall: float) -> None:
        """Start a tick at the monotonic second ``now`` and the epoch second ``wall``."""
        self.now, self.wall = now, wall
        self.tick += 1
        self.times[self.tick % self.ticks] = now
        self._fresh.clear()
        if self.tick >= self._past_until:
            self.past = None
        self.news.clear()
        if self.tick % max(1, self.ticks // 40) == 0 or self._added > MAX_GONE:
            self._drop_unseen()

    def clock_stepped(self, seconds: float) -> None:
        """Move the times of events by a step of the wall clock, so that they become no older or younger."""
        self._events.shift(seconds)
        self._holders.shift(seconds)

    def add(self, collector: str, reading: Reading) -> None:
        """Add the reading of ``collector`` in this tick."""
        self._fresh.add(collector)
        self._readings[collector] = reading
        self._kinds.clear()
        witness = collector in self.witnesses
        for event in reading.events:
            self._events.add(event, witness)
        if collector == "ranks":
            self._holders.note(self.ranks, self.wall)
        if witness:
            self.news += reading.events
        self._store(reading.samples, self._witnessed if witness else self._told, collector)

    def forget(self, collector: str) -> None:
        """Drop the facts of a collector that failed; its series have no sample in this tick."""
        self._readings.pop(collector, None)
        self._kinds.clear()

    def select(self, metric: str, **labels: str) -> Sequence[Ring]:
        """Every series of ``metric`` seen within the window whose labels include ``labels``."""
        witnessed, told = self._witnessed.get(metric, {}), self._told.get(metric, {})
        rings = [*witnessed.values(), *told.values()]
        if witnessed and told:  # of the same series the one that has a value, the witness's if both have
            rings = [ring for ring in rings if not _superseded(ring, witnessed, told)]
        return _having(rings, labels)

    def events(self, kind: str, seconds: float, run: str | None = None) -> Sequence[Event]:
        """Events of ``kind`` that happened in the last ``seconds``, oldest first; with ``run`` those about it."""
        return self._events.since(kind, self.wall - seconds, run)

    def note(self, done: Done) -> None:
        """Keep an action that was carried out, unless a newer one of its kind and target is known."""
        known = self._done.get((done.verb, done.target))
        if known is None or known.at <= done.at:
            self._done[done.verb, done.target] = done

    def ranks_then(self, second: float) -> Sequence[RankFact]:
        """The ranks that worked here at the wall second ``second``, as far back as this agent has seen them."""
        return self._holders.at(second)

    def rings(self) -> Iterator[tuple[bool, Ring]]:
        """Every series, with whether it is another's word than a witness's."""
        for told, families in ((False, self._witnessed), (True, self._told)):
            yield from ((told, ring) for family in families.values() for ring in family.values())

    def go_on(self, past: Past) -> None:
        """Begin with what an earlier agent has kept, before the first tick. Series that come late have none."""
        self.tick, self.now, self.times, self.past = past.tick, past.now, past.times, past
        self._past_until = past.tick + PAST_TICKS

    def remember(self, events: Iterable[Event]) -> None:
        """Take in what witnesses told an earlier agent."""
        for event in events:
            self._events.add(event, witness=True)

    def done(self, verb: str, target: str) -> Done | None:
        """The newest action of this kind that opsd has carried out, also before the agent's last restart."""
        return self._done.get((verb, target))

    @property
    def witnessed(self) -> Witnessed:
        """The same window without the series and events that are another's word than the kernel's or a driver's."""
        return Witnessed(self, self._witnessed, self._events)

    def known(self, collector: str) -> bool:
        """True if ``collector`` delivered in this tick."""
        return collector in self._fresh

    def __len__(self) -> int:
        return self._count

    def _facts(self, kind: type[F]) -> Sequence[F]:
        """The facts of one type, cached as runbooks ask for them dozens of times in a tick."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = tuple(
                fact for reading in self._readings.values() for fact in reading.facts if isinstance(fact, kind)
            )
        return cast("Sequence[F]", known)

    def _store(self, samples: Iterable[Sample], families: Families, source: str) -> None:
        """The hot loop: about 0.5 microseconds per sample."""
        tick, slot, told = self.tick, self.tick % self.ticks, families is self._told
        before, rebases = tick - 1, 0
        metric: Metric | None = None
        family: Family | None = None
        for sample_metric, value, labels in samples:
            if sample_metric is not metric:
                metric = sample_metric
                family = families.setdefault(metric.name, {}) if metric.kept else None
            if family is None:
                continue
            ring = family.get(labels)
            if ring is None:
                if self._count >= MAX_SERIES or (told and self._told_count >= MAX_TOLD_SERIES):
                    self.refused += 1
                    continue
                ring = family[labels] = Ring(self, metric, labels, value, source)
                if self.past is not None:
                    self.past.give(ring, told=told)
                self._count += 1
                self._told_count += told
                self._added += 1
            if ring.tick != before:
                ring.skip_to(tick)
            ring.tick = tick
            if value != ring.value:
                ring.value, ring.changed = value, tick
            offset = value - ring.base
            if -ring.limit < offset < ring.limit:
                ring.offsets[slot] = offset
            else:
                ring.store_far(slot, value, rebase=rebases < MAX_REBASES)
                rebases += 1

    def _drop_unseen(self) -> None:
        self._added = 0
        oldest = self.tick - self.ticks
        ended = [
            ring.tick
            for families in (self._witnessed, self._told)
            for family in families.values()
            for ring in family.values()
            if ring.tick < self.tick - 1
        ]
        if len(ended) > MAX_GONE:
            oldest = max(oldest, sorted(ended, reverse=True)[MAX_GONE])
        for families in (self._witnessed, self._told):
            for name, family in list(families.items()):
                for labels in [labels for labels, ring in family.items() if ring.tick <= oldest]:
                    del family[labels]
                    self._count -= 1
                    self._told_count -= families is self._told
                if not family:
                    del families[name]


class Witnessed:
    """Implements ``runbooks.base.View`` over what kernel and drivers have said. Ranks and runs are those of the pages.

    Valid in the tick of its making.
    """

    def __init__(self, window: Window, families: Families, events: EventLog) -> None:
        self.node, self.now, self.wall = window.node, window.now, window.wall
        self.gpus, self.ranks, self.runs = window.gpus, window.ranks, window.runs
        self.known, self.done, self.ranks_then = window.known, window.done, window.ranks_then
        self._families = families
        self._events = events

    def select(self, metric: str, **labels: str) -> Sequence[Ring]:
        """Every witnessed series of ``metric`` whose labels include ``labels``."""
        return _having(self._families.get(metric, {}).values(), labels)

    def events(self, kind: str, seconds: float, run: str | None = None) -> Sequence[Event]:
        """Witnessed events of ``kind`` of the last ``seconds``, oldest first; with ``run`` those about it."""
        return self._events.witnessed(kind, self.wall - seconds, run)


def _stored(offset: float) -> float:
    """``offset`` as a 32-bit number, NaN if it is none."""
    return offset if -_LARGEST < offset < _LARGEST else _NAN


def _having(rings: Iterable[Ring], labels: Mapping[str, str]) -> list[Ring]:
    """Those of the rings that have all of ``labels``."""
    if not labels:
        return [*rings]
    names, values = tuple(labels), tuple(labels.values())
    wanted = values if len(values) > 1 else values[0]
    found: list[Ring] = []
    known: tuple[str, ...] | None = None
    chosen: Callable[[tuple[str, ...]], object] | None = None
    for ring in rings:
        if ring.metric.labels is not known:
            known = ring.metric.labels
            chosen = itemgetter(*map(known.index, names)) if {*names} <= {*known} else None
        if chosen is not None and chosen(ring.values_of) == wanted:
            found.append(ring)
    return found


def _superseded(ring: Ring, witnessed: Family, told: Family) -> bool:
    """True if the other book has the same series, and that has a value where this one has none."""
    first, second = witnessed.get(ring.values_of), told.get(ring.values_of)
    if first is None or second is None:
        return False
    return ring is (first if first.last is None and second.last is not None else second)


class Ring:
    """One series; implements ``runbooks.base.Series``."""

    __slots__ = (
        "_labels", "base", "changed", "limit", "metric", "offsets", "source", "tick", "value", "values_of", "window",
    )  # fmt: skip

    def __init__(self, window: Window, metric: Metric, labels: tuple[str, ...], value: float, source: str) -> None:
        self.window = window
        self.source = source
        self.metric = metric
        self.values_of = labels
        self._labels: dict[str, str] | None = None
        self.base = value if math.isfinite(value) else 0.0
        self.limit = _FIRST_LIMIT
        self.offsets = array("f", [_NAN]) * window.ticks
        self.tick = self.changed = window.tick - 1
        self.value = value

    @property
    def labels(self) -> Mapping[str, str]:
        """Label names and values."""
        if self._labels is None:
            self._labels = dict(zip(self.metric.labels, self.values_of, strict=True))
        return self._labels

    @property
    def last(self) -> float | None:
        """The value of this tick, exactly; None if there is none or it is no finite number."""
        return self.value if self.tick == self.window.tick and self.value == self.value else None

    def values(self, seconds: float) -> Sequence[tuple[float, float]]:
        """(monotonic second, value) of the last ``seconds``, oldest first, without missing samples."""
        base, ring, times, size = self.base, self.offsets, self.window.times, self.window.ticks
        ticks = range(max(0, self.window.tick - size + 1), self.tick + 1)
        oldest = self.window.now - seconds
        first = ticks.start + bisect_left(ticks, oldest, key=lambda tick: times[tick % size])
        begin, end = first % size, (self.tick + 1) % size
        if first > self.tick:
            return []
        if begin < end:
            pairs = zip(times[begin:end], ring[begin:end], strict=True)
        else:
            pairs = zip(times[begin:] + times[:end], ring[begin:] + ring[:end], strict=True)
        return [(at, base + offset) for at, offset in pairs if offset == offset]

    def unchanged(self, seconds: float) -> bool:
        """True if the value has been the same in the last ``seconds``; NaN is never the same."""
        window = self.window
        if window.tick - self.changed >= window.ticks:
            return True
        return window.times[self.changed % window.ticks] < window.now - seconds

    def increase(self, seconds: float) -> float | None:
        """Growth of a counter over the last ``seconds``, corrected for resets; None with fewer than two values."""
        points = self.values(seconds)
        if len(points) < 2:
            return None
        growth, previous = 0.0, points[0][1]
        for _, value in points[1:]:
            growth += value - previous if value >= previous else value
            previous = value
        return growth

    def skip_to(self, tick: int) -> None:
        """Mark the ticks since the last sample as missing."""
        ticks = self.window.ticks
        for missed in range(max(self.tick + 1, tick - ticks + 1), tick):
            self.offsets[missed % ticks] = _NAN

    def store_far(self, slot: int, value: float, *, rebase: bool) -> None:
        """Store ``value``, which is far from the base, and make it the new base on demand; it may not be finite."""
        if not math.isfinite(value):
            self.offsets[slot] = self.value = _NAN
            return
        if not rebase:
            self.offsets[slot] = _stored(value - self.base)
            return
        self.offsets = array("f", map(_stored, map(float(self.base - value).__add__, self.offsets)))
        self.offsets[slot] = 0.0
        self.base = value
        # Twice the window's spread, so that a steady counter is rebased about once in two windows.
        finite = [offset for offset in self.offsets if offset == offset]
        self.limit = max(_FIRST_LIMIT, 2.0 * max(finite), -2.0 * min(finite))


MAX_WITNESSED: Final = 2_000
MAX_TOLD: Final = 500
"""Events of a kind that are kept of witnesses, and of all others; the oldest are dropped of the user who has most."""
USER_BYTES: Final = 1 << 20
USERS_BYTES: Final = 3 << 20
"""Size of the events kept of one user, and of all users, as they were read; in memory they take some six times that."""
STEPS: Final = 4
"""Steps of the clock across which an event that is read again is recognised."""

Teller = tuple[int | None, bool]
"""The user who reported an event (None: no user), and whether the source is a witness."""


class EventLog:
    """The events by kind and teller, with a bound for each kind and for what each user says. Used in one thread."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[Teller, deque[Event]]] = {}
        self._sizes: dict[int, int] = {}
        self._sorted: dict[str, list[Event]] = {}
        self._by_run: dict[str, dict[str, list[Event]]] = {}
        self._steps: deque[float] = deque(maxlen=STEPS)

    def add(self, event: Event, witness: bool) -> None:
        """Remember ``event``; what is too much then is forgotten.

        The files of a run may be read a second time, after its folder was restored: the same word counts once.
        """
        tellers = self._kinds.setdefault(event.kind, {})
        said = tellers.setdefault((event.user, witness), deque())
        if not witness and any(one.at == told.at and one == told for told in self._as_shifted(event) for one in said):
            return
        said.append(event)
        self._sorted.pop(event.kind, None)
        self._by_run.pop(event.kind, None)
        if event.user is not None:
            self._sizes[event.user] = self._sizes.get(event.user, 0) + event.size
            self._bound_users(event.user)
        alike = [teller for teller in tellers if teller[1] is witness]
        if sum(len(tellers[teller]) for teller in alike) > (MAX_WITNESSED if witness else MAX_TOLD):
            self._drop(event.kind, max(alike, key=lambda teller: len(tellers[teller])))

    def _as_shifted(self, event: Event) -> Iterator[Event]:
        """``event`` as it would be here if it had been added before one of the steps of the clock, or after all."""
        yield event
        steps = list(self._steps)
        for first in range(len(steps)):
            yield replace(event, at=sum(steps[first:], event.at))

    def shift(self, seconds: float) -> None:
        """Move the times of all events by a step of the wall clock."""
        self._steps.append(seconds)
        for tellers in self._kinds.values():
            for teller, events in tellers.items():
                tellers[teller] = deque(replace(event, at=event.at + seconds) for event in events)
        self._sorted.clear()
        self._by_run.clear()

    def since(self, kind: str, oldest: float, run: str | None = None) -> Sequence[Event]:
        """Events of ``kind`` from the wall second ``oldest`` on, oldest first; with ``run`` those about it."""
        if kind not in self._kinds:
            return ()
        found = self._of_run(kind, run) if run is not None else self._of_kind(kind)
        return found[bisect_left(found, oldest, key=lambda event: event.at) :]

    def witnessed(self, kind: str, oldest: float, run: str | None = None) -> Sequence[Event]:
        """The same, of those that a witness told."""
        told = (events for (_, witness), events in self._kinds.get(kind, {}).items() if witness)
        return _in_order(e for events in told for e in events if e.at >= oldest and run in (None, e.data.get("run")))

    def _of_kind(self, kind: str) -> list[Event]:
        if kind not in self._sorted:
            self._sorted[kind] = _in_order(e for events in self._kinds[kind].values() for e in events)
        return self._sorted[kind]

    def _of_run(self, kind: str, run: str) -> list[Event]:
        """Runbooks ask for each run; going through all events for each of them took longer than a tick."""
        if kind not in self._by_run:
            runs = self._by_run[kind] = defaultdict(list)
            for event in self._of_kind(kind):
                if isinstance(name := event.data.get("run"), str):
                    runs[name].append(event)
        return self._by_run[kind].get(run, [])

    def _bound_users(self, user: int) -> None:
        while self._sizes[user] > USER_BYTES:
            self._drop_of(user)
        while sum(self._sizes.values()) > USERS_BYTES:
            self._drop_of(max(self._sizes, key=lambda one: self._sizes[one]))

    def _drop_of(self, user: int) -> None:
        """Drop the oldest event of the kind of which the user has most."""
        theirs = (
            (len(events), kind, teller)
            for kind, tellers in self._kinds.items()
            for teller, events in tellers.items()
            if teller[0] == user
        )
        _, kind, teller = max(theirs)
        self._drop(kind, teller)

    def _drop(self, kind: str, teller: Teller) -> None:
        events = self._kinds[kind][teller]
        dropped = events.popleft()
        if not events:
            del self._kinds[kind][teller]
        if dropped.user is not None:
            self._sizes[dropped.user] -= dropped.size
            if not self._sizes[dropped.user]:
                del self._sizes[dropped.user]
        self._sorted.pop(kind, None)
        self._by_run.pop(kind, None)


def _in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.at)


SLACK_S: Final = 5.0
"""Seconds around its interval in which a rank may still have been there: it is looked at once a second or later."""
MAX_ENDED: Final = 1_000
"""Ranks that are gone and remembered: those that ended last."""

_Name = tuple[str, int, int, int]


@dataclass(slots=True)
class _Stay:
    fact: RankFact
    begin: float
    end: float | None = None


class Holders:
    """Who worked on this node when, so that evidence names who was there when it struck.

    Used in one thread. Times are epoch seconds.
    """

    def __init__(self) -> None:
        self._here: dict[_Name, _Stay] = {}
        self._gone: list[_Stay] = []

    def note(self, ranks: Iterable[RankFact], now: float) -> None:
        """Take in what the rank pages tell; while they cannot be read nobody is known to have left."""
        live = {(rank.run, rank.rank, rank.generation, rank.pid): rank for rank in ranks if rank.live}
        for name in self._here.keys() - live.keys():
            stay = self._here.pop(name)
            stay.end, stay.fact = now, replace(stay.fact, steps=())
            self._gone.append(stay)
        for name, rank in live.items():
            stay = self._here.setdefault(name, _Stay(rank, now))
            stay.fact = rank
        del self._gone[:-MAX_ENDED]

    def at(self, second: float) -> Sequence[RankFact]:
        """The ranks that were here at ``second``; of two that followed each other the one that came first."""
        return [
            stay.fact
            for stay in (*self._gone, *self._here.values())
            if stay.begin - SLACK_S <= second and (stay.end is None or second <= stay.end + SLACK_S)
        ]

    def shift(self, seconds: float) -> None:
        """Move all times by a step of the wall clock."""
        for stay in (*self._gone, *self._here.values()):
            stay.begin += seconds
            stay.end = None if stay.end is None else stay.end + seconds
