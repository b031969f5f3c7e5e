"""What the collectors of a real agent delivered: recorded, and played again with changes that must not matter.

``python -m tests.fakes.recorded FILE opsd demo …`` is ``opsd demo``; the agent of its disturbed run records its ticks.
"""

from __future__ import annotations

import pickle
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from opsd.agent.actions import Executor, Intended
from opsd.agent.gather import Health, Source
from opsd.agent.incident_manager import IncidentManager
from opsd.agent.journal import Journal
from opsd.agent.judge import BOOT_TIME, Judge
from opsd.agent.kept_window import SAVE_S, pack, unpack
from opsd.agent.lifecycle import UNPROVEN_S, Outcome
from opsd.agent.logs import Log
from opsd.agent.loop import CLOCK_STEP_S, Loop
from opsd.agent.metrics import COLLECTOR_STATE
from opsd.agent.window import Window
from opsd.collectors import witnesses
from opsd.collectors.base import Event, Fact, GpuFact, Reading, Sample
from opsd.commands.main import main
from opsd.demo.scene import Scene
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Action, Incident
from opsd.settings.policy import PolicySettings
from tests.fakes.metamorphic import AFTER_S, BLIND_S, CLOCK, HOUR_S, LATE_S, over_within

AWAY_S = 2.0
"""The time without an agent when it is started again."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick at the monotonic second ``now``: what each collector delivered, None for one that does not deliver.

    The agent ``starts`` in this tick, with what the one before has kept until it was "stopped", "killed" or "booted".
    """

    now: float
    wall: float
    told: Mapping[str, Reading | None]
    starts: str = ""


def record(file: Path) -> None:
    """From now on an agent in this process writes what it takes in to ``file``."""
    take_in = Loop._take_in
    output = file.open("ab")

    def recorded(self: Loop, sources: Sequence[Source], now: float, wall: float) -> None:
        take_in(self, sources, now, wall)
        told = {s.name: s.reading if s.fresh else None for s in sources if s.fresh or not s.health.delivers}
        pickle.dump(Tick(now, wall, {**told, "agent": Reading(self._collectors)}), output)
        output.flush()

    Loop._take_in = recorded  # type: ignore[method-assign]


def read(file: Path) -> list[Tick]:
    """The ticks that an agent has recorded; the last may be cut off."""
    ticks = []
    with file.open("rb") as stream:
        while True:
            try:
                ticks.append(pickle.load(stream))
            except (EOFError, pickle.UnpicklingError):
                return ticks


class _Executor(Executor):
    """Nothing is done; all of it succeeds, as it did when the ticks were recorded."""

    def __init__(self, told: Counter[str]) -> None:
        super().__init__(shm=Path("/nonexistent"), notify=lambda _text, _fields: None)
        self._told = told

    def submit(self, incident: str, number: int, action: Action, _intended: Intended) -> None:
        if action.verb == "notify":
            self._told[incident] += 1
        self.outcomes.put(Outcome(incident, number, True, "done"))


@dataclass
class Played:
    """The incidents by their ids, how often people were told of each, and bugs of the agent."""

    incidents: dict[str, Incident] = field(default_factory=dict)
    told: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def pages(self) -> Counter[str]:
        """How often people were told, by kind."""
        return Counter(self.incidents[id].kind for id in self.told.elements() if id in self.incidents)

    def only(self, which: Callable[[Incident], bool]) -> Played:
        """The same with these incidents only."""
        return replace(self, incidents={id: each for id, each in self.incidents.items() if which(each)})


def play(ticks: Sequence[Tick]) -> Played:
    """Have the real window, judge and incident manager take in ``ticks``."""
    played, saved, of_zero = Played(), b"", ticks[0].wall - ticks[0].now
    with tempfile.TemporaryDirectory(prefix="opsd-recorded-") as folder:
        journal, window, manager = _agent(Path(folder), played, ticks[0])
        for tick in ticks:
            if tick.starts:
                journal.window(pack(window) if tick.starts == "stopped" else saved)
                journal.close()
                played.incidents |= {each.id: each for each in (*manager.ended, *manager.current)}
                journal, window, manager = _agent(Path(folder), played, tick)
            step, of_zero = tick.wall - tick.now - of_zero, tick.wall - tick.now
            if abs(step) > CLOCK_STEP_S:
                window.clock_stepped(step)
                manager.clock_stepped(step)
            window.begin(tick.now, tick.wall)
            for name, reading in tick.told.items():
                if reading is None:
                    window.forget(name)
                else:
                    window.add(name, reading)
            manager.respond(window)
            if window.tick % int(SAVE_S) == 0:
                saved = pack(window)
        journal.close()
    played.incidents |= {each.id: each for each in (*manager.ended, *manager.current)}
    return played


def _agent(folder: Path, played: Played, tick: Tick) -> tuple[Journal, Window, IncidentManager]:
    """An agent with the policy of the demo's, which goes on with the journal in ``folder``."""

    def logged(event: Mapping[str, object]) -> None:
        if event["level"] == "error":
            played.errors.append(f"{event['event']}: {event.get('exception', '')}")

    boot = "two" if tick.starts == "booted" else "one"
    journal, log = Journal(folder, lambda _problem: None, boot=boot), Log(logged)
    manager = IncidentManager(
        Judge(RUNBOOKS, log, used_s=lambda: 0.0), _Executor(played.told), journal, log,
        policy=PolicySettings(mode="act", cooldown_s=2.0), started_at=tick.wall,
    )  # fmt: skip
    window = Window("n01", witnesses=witnesses())
    if manager.kept_window:
        window.go_on(unpack(manager.kept_window, window.ticks, tick.now))
    return journal, window, manager


Change = Callable[[Sequence[Tick], random.Random], list[Tick]]


def starts_again(how: str, ticks: Sequence[Tick], rng: random.Random) -> list[Tick]:
    """The agent ends at some instant. The next one reads all events again: kernel log and run folders keep them."""
    at = _instant(ticks, rng)
    after = next(n for n in range(at, len(ticks)) if ticks[n].now >= ticks[at].now + AWAY_S)
    again = _with_events_of(ticks[: after + 1], ticks[after])
    return [*ticks[:at], replace(again, starts=how), *ticks[after + 1 :]]


def events_twice(ticks: Sequence[Tick], rng: random.Random) -> list[Tick]:
    """At some instant all events come a second time."""
    at = _instant(ticks, rng)
    return [*ticks[:at], _with_events_of(ticks[: at + 1], ticks[at]), *ticks[at + 1 :]]


def events_late(ticks: Sequence[Tick], _rng: random.Random) -> list[Tick]:
    """What launcher and ranks write comes a minute late."""
    changed, waiting = list[Tick](), list[tuple[float, Event]]()
    for tick in ticks:
        reading = tick.told.get("ranks")
        waiting += [(tick.now + LATE_S, event) for event in (reading.events if reading else ())]
        if reading is not None:
            due = tuple(event for at, event in waiting if at <= tick.now)
            waiting = [each for each in waiting if each[0] > tick.now]
            tick = replace(tick, told={**tick.told, "ranks": replace(reading, events=due)})
        changed.append(tick)
    return changed


def blind(collector: str, ticks: Sequence[Tick], rng: random.Random) -> list[Tick]:
    """A collector fails for 20 s from some instant on, and delivers the events of that time afterwards."""
    at = _instant(ticks, rng)
    until = next(n for n in range(at, len(ticks)) if ticks[n].now >= ticks[at].now + BLIND_S)
    unseen = [_without(collector, tick) for tick in ticks[at:until]]
    return [*ticks[:at], *unseen, _with_events_of(ticks[at : until + 1], ticks[until], collector), *ticks[until + 1 :]]


def run_ends(ticks: Sequence[Tick], rng: random.Random) -> list[Tick]:
    """At some instant the run is over, as it is in the last tick; the agent goes on until nothing waits for a proof."""
    at = _instant(ticks, rng)
    over = {name: ticks[-1].told[name] for name in ("ranks", "nccl", "jobs")} | {"nvml": ticks[0].told["nvml"]}
    return [*ticks[:at], *_afterwards(ticks[at], over)]


def node_boots(ticks: Sequence[Tick], rng: random.Random) -> list[Tick]:
    """At some instant the node is booted, which takes a minute; there is no run on it then."""
    at = _instant(ticks, rng)
    host, nvml = ticks[at].told["host"], ticks[0].told["nvml"]
    assert host is not None
    since_boot = (s for s in host.samples if s.metric.name != BOOT_TIME)
    booted = next(Sample(s.metric, ticks[at].wall + 30.0) for s in host.samples if s.metric.name == BOOT_TIME)
    told = {"ranks": Reading(), "nccl": None, "nvml": nvml, "host": replace(host, samples=(*since_boot, booted))}
    first, *others = _afterwards(ticks[at], told, pause_s=60.0)
    return [*ticks[:at], replace(first, starts="booted"), *others]


def clock_steps(by_s: float, ticks: Sequence[Tick], rng: random.Random) -> list[Tick]:
    """At some instant the wall clock is set; all that is told from then on is by the new one."""
    at = _instant(ticks, rng)
    return [*ticks[:at], *(_by_another_clock(tick, by_s) for tick in ticks[at:])]


def _by_another_clock(tick: Tick, by_s: float) -> Tick:
    told = {
        name: reading
        and replace(
            reading,
            samples=tuple(Sample(s.metric, _epoch(s.value, by_s), s.labels) for s in reading.samples),
            events=tuple(replace(e, at=e.at + by_s, data=_moved(e.data, by_s)) for e in reading.events),
            facts=tuple(
                replace(fact, **_moved({each.name: getattr(fact, each.name) for each in fields(fact)}, by_s))
                for fact in reading.facts
            ),
        )
        for name, reading in tick.told.items()
    }
    return replace(tick, wall=tick.wall + by_s, told=told)


def _moved(values: Mapping[str, Any], by_s: float) -> dict[str, Any]:
    return {name: _epoch(value, by_s) if isinstance(value, float) else value for name, value in values.items()}


def _epoch(value: float, by_s: float) -> float:
    """``value``, moved if it is a second since 1970 of our days."""
    return value + by_s if 1.5e9 < value < 3e9 else value


def _afterwards(tick: Tick, told: Mapping[str, Reading | None], pause_s: float = 0.0) -> list[Tick]:
    """Ticks without events after ``tick``, with what is ``told`` from then on, until nothing waits for a proof.

    No process of the run is left on a GPU.
    """
    states = {name: Health.NO_DATA for name, reading in told.items() if reading is None}
    quiet = {
        name: reading and replace(reading, events=(), facts=tuple(map(_without_orphans, reading.facts)))
        for name, reading in {**tick.told, **told, "agent": _stating(tick, states)}.items()
    }
    seconds = range(int(UNPROVEN_S + 2 * AFTER_S))
    return [Tick(tick.now + pause_s + s, tick.wall + pause_s + s, quiet) for s in seconds]


def _without_orphans(fact: Fact) -> Fact:
    return replace(fact, orphans=()) if isinstance(fact, GpuFact) else fact


def _instant(ticks: Sequence[Tick], rng: random.Random) -> int:
    """A tick after the ranks were seen, and early enough for what opens then to end."""
    return rng.randrange(15, len(ticks) - 40)


def _with_events_of(earlier: Sequence[Tick], tick: Tick, only: str = "") -> Tick:
    told = {
        name: reading
        and (replace(reading, events=tuple(_events(earlier, name))) if not only or name == only else reading)
        for name, reading in tick.told.items()
    }
    return replace(tick, told=told)


def _events(ticks: Sequence[Tick], collector: str) -> Iterator[Event]:
    for tick in ticks:
        reading = tick.told.get(collector)
        yield from reading.events if reading else ()


def _without(collector: str, tick: Tick) -> Tick:
    return replace(tick, told={**tick.told, collector: None, "agent": _stating(tick, {collector: Health.ERROR})})


def _stating(tick: Tick, states: Mapping[str, Health]) -> Reading:
    """What the agent says of itself in ``tick``, with these states of collectors."""
    agent = tick.told["agent"]
    assert agent is not None
    others = (s for s in agent.samples if s.metric != COLLECTOR_STATE or s.labels[0] not in states)
    changed = (
        Sample(COLLECTOR_STATE, float(state is each), (name, each.value))
        for name, state in states.items()
        for each in Health
    )
    return Reading((*others, *changed))


CHANGES: Mapping[str, Change] = {
    "agent stopped": partial(starts_again, "stopped"),
    "agent killed": partial(starts_again, "killed"),
    "events twice": events_twice,
    "events late": events_late,
    "run ends": run_ends,
    "node boots": node_boots,
    "clock an hour ahead": partial(clock_steps, HOUR_S),
    "clock an hour back": partial(clock_steps, -HOUR_S),
    **{f"{name} blind": partial(blind, name) for name in ("ranks", "nvml", "kmsg", "host")},
}


UNSEEN_S: Mapping[str, float] = {
    **dict.fromkeys(CHANGES, 0.0), "agent stopped": AWAY_S + 8.0, "agent killed": AWAY_S + 8.0,
    "events late": LATE_S, "ranks blind": BLIND_S, "node boots": 60.0,
}  # fmt: skip
"""So long the changed agent sees nothing. One that starts looks at some things for several seconds before it judges."""


def compared(name: str, plain: Played, ticks: Sequence[Tick], changed: Sequence[Tick]) -> list[str]:
    """Play what ``name`` has ``changed``: the differences that matter to ``plain``, see ``differences``.

    Of a stream that ends earlier counts what had opened until then. A step of the clock is an incident of its own.
    """
    other = play(changed)
    if name in ENDS:
        at = next(before.wall for before, after in zip(ticks, changed, strict=False) if before is not after)
        plain = plain.only(lambda each: each.opened_at < at)
    if name.startswith("clock"):
        other = other.only(lambda each: each.kind not in CLOCK)
    return differences(name, plain, other)


ENDS = ("run ends", "node boots")
"""Changes after which the rest of the stream is not played."""


def differences(name: str, plain: Played, other: Played) -> list[str]:
    """What is not as in the stream that was not changed by ``name``; [] if that did not matter.

    What was over before this agent could see it need not be there. A process that was never seen has no known GPU.
    """
    gpu = name != "ranks blind"
    about = partial(_about, gpu=gpu)
    before, after = (incidents_of(each.incidents.values(), gpu=gpu) for each in (plain, other))
    before -= Counter(about(each) for each in plain.incidents.values() if over_within(UNSEEN_S[name], each)) - after
    left = {each.kind for each in plain.incidents.values() if each.resolved_at is None}
    return [
        *other.errors,
        *(f"missing: {each}" for each in before - after),
        *(f"extra: {each}" for each in after - before),
        *(f"left {i.state}: {about(i)}" for i in other.incidents.values() if not i.resolved_at and i.kind not in left),
        *(f"told {more} more times: {kind}" for kind, more in (other.pages() - plain.pages()).items()),
    ]


def incidents_of(incidents: Iterable[Incident], *, gpu: bool = True) -> Counter[tuple[object, ...]]:
    """What is compared of ``incidents``, with or without the GPU of the culprit."""
    return Counter(_about(each, gpu=gpu) for each in incidents)


def _about(incident: Incident, *, gpu: bool) -> tuple[object, ...]:
    culprit = incident.culprit
    return incident.kind, incident.key, culprit.component, gpu and culprit.gpu, culprit.rank, incident.job


def _record_demo(file: Path) -> None:
    """Have the demo start its agent of the disturbed run by this module."""
    start = Scene.start

    def started(self: Scene, arguments: Sequence[str], log: str) -> object:
        first = [*arguments[:2]] == ["opsd", "agent"] and log == "agent-disturbed.log"
        return start(self, ["tests.fakes.recorded", str(file), *arguments] if first else arguments, log)

    Scene.start = started  # type: ignore[method-assign, assignment]


def _run(words: Sequence[str]) -> None:
    target = Path(words[0])
    sys.argv = [*words[1:]]
    if sys.argv[1] == "agent":
        record(target)
    else:
        _record_demo(target)
    main()


if __name__ == "__main__":
    from tests.fakes import recorded  # its classes are pickled by this name, which is not __main__

    recorded._run(sys.argv[1:])
