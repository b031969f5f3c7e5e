"""Gathering and judging: whatever one collector does, the others and the loop go on, and it shows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from opsd import client, config
from opsd.agent import collectors
from opsd.agent.gather import CPU_BURST_S, LIMITED_S, MAX_EVENTS, MAX_SAMPLES, Gatherer, Health
from opsd.agent.judge import LONGEST_WAIT_S, SHARE, TICK_S, Judge, ProcessorTime
from opsd.agent.window import Window
from opsd.collectors import plugins
from opsd.collectors.base import Event, NoData, Reading, Sample
from opsd.collectors.ranks import RanksCollector
from opsd.runbooks.base import Finding, Runbook, View
from tests.fakes.clock import FakeClock, eventually
from tests.fakes.collectors import SILENT, VALUE, FakeCollector, HangingCollector
from tests.fakes.incidents import finding

# Gathering: whatever one collector does, the others and the loop go on, and it shows.


LONG_S = 20.0


def raising(error: BaseException):
    def answer() -> Reading:
        raise error

    return answer


@pytest.fixture
def hanging():
    collector = HangingCollector("driver")
    yield collector
    collector.release.set()


def test_a_reading_is_fresh_in_its_tick() -> None:
    """A collector that delivers is ok, with the samples of this call."""
    (source,) = Gatherer([FakeCollector("a")], deadline_s=5, clock=time.monotonic).gather(LONG_S)
    assert (source.health, source.fresh, source.reading.samples) == (Health.OK, True, (Sample(VALUE, 1.0, ("a",)),))


@pytest.mark.parametrize("error", [ValueError("bad sensor"), SystemExit(1)])
def test_a_collector_that_raises_is_counted_and_shows_nothing(error: BaseException) -> None:
    """An exception costs this collector its samples, and nobody else anything."""
    bad, good = FakeCollector("bad", raising(error)), FakeCollector("good")
    gatherer = Gatherer([bad, good], deadline_s=5, clock=time.monotonic)
    for _ in range(2):
        first, second = gatherer.gather(LONG_S)
    assert (first.health, first.errors, first.fresh, first.reading) == (Health.ERROR, 2, False, Reading())
    assert str(error) in first.reason
    assert second.fresh


def test_no_data_is_neither_healthy_nor_an_error() -> None:
    """The reason of an expected absence is passed on."""
    (source,) = Gatherer(
        [FakeCollector("nvml", lambda: NoData("no driver"))], deadline_s=5, clock=time.monotonic
    ).gather(LONG_S)
    assert (source.health, source.reason, source.errors, source.fresh) == (Health.NO_DATA, "no driver", 0, False)


def test_a_hanging_collector_delays_nobody_and_is_not_started_again(hanging: HangingCollector) -> None:
    """The loop waits its share of a tick once; after the deadline the collector is hung and its samples are gone."""
    hanging.release.set()
    gatherer = Gatherer([hanging, FakeCollector("good")], deadline_s=0.05, clock=time.monotonic)
    assert gatherer.gather(LONG_S)[0].fresh
    hanging.release.clear()
    gatherer.gather(0.01)
    time.sleep(0.1)
    driver, good = gatherer.gather(LONG_S)
    assert (driver.health, driver.fresh, driver.reading) == (Health.HUNG, False, Reading())
    assert good.fresh
    assert hanging.calls == 2


def test_a_collector_that_comes_back_is_used_again(hanging: HangingCollector) -> None:
    """What a hung driver call returns in the end is taken in, and the collector is asked again."""
    gatherer = Gatherer([hanging], deadline_s=0.0, clock=time.monotonic)
    assert gatherer.gather(0.01)[0].health is Health.HUNG
    hanging.release.set()
    assert eventually(lambda: gatherer.gather(LONG_S)[0].health is Health.OK)


def test_a_late_reading_loses_no_event(hanging: HangingCollector) -> None:
    """An event delivered after the loop had stopped waiting arrives with the next tick's, once."""
    events = iter(range(100))
    hanging.answer = lambda: Reading(events=(Event("xid", 1.0, str(next(events))),))
    gatherer = Gatherer([hanging], deadline_s=LONG_S, clock=time.monotonic)
    gatherer.gather(0.0)
    hanging.release.set()
    seen: list[str] = []
    assert eventually(lambda: bool(seen.extend(e.message for e in gatherer.gather(LONG_S)[0].reading.events) or seen))
    assert seen[:2] == ["0", "1"]


def test_before_the_first_collection_has_ended_nothing_is_claimed(hanging: HangingCollector) -> None:
    """A collector that has not returned yet is starting: neither ok nor hung."""
    (source,) = Gatherer([hanging], deadline_s=LONG_S, clock=time.monotonic).gather(0.0)
    assert (source.health, source.fresh) == (Health.STARTING, False)


def test_a_dear_collector_is_asked_seldom_and_its_last_answer_holds() -> None:
    """In between its samples are those of every tick, and its events happened once."""
    clock = FakeClock()
    drives, always = FakeCollector("drives"), FakeCollector("always")
    drives.interval_s = 60.0
    drives.answer = lambda: Reading((Sample(VALUE, float(drives.calls), ("drives",)),), (Event("xid", 1.0, "new"),))
    gatherer = Gatherer([drives, always], deadline_s=5, clock=clock.monotonic)
    seen = []
    for _ in range(3):
        source, other = gatherer.gather(LONG_S)
        seen.append((source.fresh, source.reading.samples[0].value, len(source.reading.events), other.fresh))
        clock.advance(30)
    assert seen == [(True, 1.0, 1, True), (True, 1.0, 0, True), (True, 2.0, 1, True)]


@pytest.mark.parametrize("answer", [lambda: NoData("none"), raising(ValueError("bad"))])
def test_what_a_dear_collector_could_not_tell_does_not_hold(answer) -> None:
    """No data and errors stay what they are until it is asked again."""
    clock = FakeClock()
    drives = FakeCollector("drives", answer)
    drives.interval_s = 60.0
    gatherer = Gatherer([drives], deadline_s=5, clock=clock.monotonic)
    (first,) = gatherer.gather(LONG_S)
    health = first.health
    clock.advance(1)
    (source,) = gatherer.gather(LONG_S)
    assert (source.health, source.fresh, source.errors, drives.calls) == (health, False, source.errors, 1)


def test_a_dear_collector_that_hangs_is_hung(hanging: HangingCollector) -> None:
    """The interval excuses nobody who does not return."""
    clock = FakeClock()
    hanging.interval_s = 60.0
    gatherer = Gatherer([hanging], deadline_s=2, clock=clock.monotonic)
    gatherer.gather(0.0)
    clock.advance(3)
    assert gatherer.gather(0.0)[0].health is Health.HUNG


def test_a_reading_has_a_most_of_samples_and_events() -> None:
    """What users make up must not fill the window; the collector is limited, which counts as seeing, and says so."""
    samples = tuple(Sample(VALUE, 1.0, (str(number),)) for number in range(MAX_SAMPLES + 2))
    events = tuple(Event("told", float(number), "") for number in range(MAX_EVENTS + 1))
    gatherer = Gatherer([FakeCollector("a", lambda: Reading(samples, events))], deadline_s=5, clock=time.monotonic)
    (source,) = gatherer.gather(LONG_S)
    assert (source.health, source.fresh, source.health.delivers) == (Health.LIMITED, True, True)
    assert (len(source.reading.samples), len(source.reading.events)) == (MAX_SAMPLES, MAX_EVENTS)
    assert source.reason == "2 samples left out; 1 events left out"


def test_a_limit_that_bites_now_and_then_is_one_state() -> None:
    """It stands for a while, so that a user cannot fill the log with it."""
    clock, readings = FakeClock(), [Reading(limited="much"), Reading(), Reading()]
    gatherer = Gatherer([FakeCollector("a", lambda: readings.pop(0))], deadline_s=5, clock=clock.monotonic)
    seen = []
    for ahead in (0.0, 1.0, LIMITED_S):
        clock.advance(ahead)
        (source,) = gatherer.gather(LONG_S)
        seen.append((source.health, source.reason))
    assert seen == [(Health.LIMITED, "much"), (Health.LIMITED, "much"), (Health.OK, "")]


def test_a_collector_that_takes_too_much_processor_time_pauses() -> None:
    """What it delivered last stands meanwhile."""
    clock = FakeClock()

    def costly() -> Reading:
        until = time.thread_time() + CPU_BURST_S + 0.2
        while time.thread_time() < until:
            pass
        return Reading()

    collector = FakeCollector("a", costly)
    gatherer = Gatherer([collector], deadline_s=60, clock=clock.monotonic)
    (source,) = gatherer.gather(LONG_S)
    assert source.health is Health.LIMITED
    assert "too much processor time" in source.reason
    clock.advance(1.0)
    gatherer.gather(LONG_S)
    assert source.fresh and collector.calls == 1
    clock.advance(60.0)
    collector.answer = Reading
    gatherer.gather(LONG_S)
    assert collector.calls == 2


def test_processor_time_in_threads_of_its_own_counts() -> None:
    """A collector says so in ``taken_s``."""
    clock = FakeClock()

    class Threads(FakeCollector):
        taken_s = 0.0

        def collect(self) -> Reading | NoData:
            self.taken_s += CPU_BURST_S + 0.2
            return super().collect()

    gatherer = Gatherer([Threads("a", Reading)], deadline_s=60, clock=clock.monotonic)
    (source,) = gatherer.gather(LONG_S)
    assert "too much processor time" in source.reason


# Which collectors the agent has, and what they tell each other.


SECTIONS = [plugin.name for plugin in plugins()]


def names(settings: config.Settings) -> list[str]:
    return [collector.name for collector in collectors.build(settings)]


def test_each_collector_has_a_section_of_its_name() -> None:
    """What is said of a collector can be looked up in the configuration."""
    assert names(config.Settings()) == SECTIONS
    assert len(set(SECTIONS)) == len(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_collector_can_be_switched_off(tmp_path: Path, section: str) -> None:
    """It alone."""
    file = tmp_path / "opsd.toml"
    file.write_text(f"[{section}]\nenabled = false\n")
    assert names(config.load(file, env={})) == [name for name in SECTIONS if name != section]


def test_dear_sources_are_asked_as_seldom_as_configured() -> None:
    """The settings reach the collectors."""
    wanted = {"nvme": 300.0, "storage_net": 30.0, "infiniband": 4.0}
    settings = config.load(None, [f"{name}.interval_s={seconds:g}" for name, seconds in wanted.items()], env={})
    found = {one.name: getattr(one, "interval_s", 0.0) for one in collectors.build(settings)}
    assert {name: found[name] for name in wanted} == wanted


def test_the_mounts_of_runs_are_watched(tmp_path: Path) -> None:
    """Where a run writes matters, whatever the type of its file system is."""
    run = {
        "job": "1", "node": "n", "state": "running", "generation": 1, "launcher_pid": os.getpid(),
        "launcher_start": client.process_start(os.getpid()), "world_size": 1, "control": "", "folder": "/proc/run",
    }  # fmt: skip
    (tmp_path / "train").mkdir()
    (tmp_path / "train/run.json").write_text(json.dumps(run))
    built = {one.name: one for one in collectors.build(config.load(None, [f"ranks.root={tmp_path}"], env={}))}

    def mounts() -> set[str]:
        reading = built["storage"].collect()
        assert isinstance(reading, Reading)
        return {sample.labels[0] for sample in reading.samples if sample.metric.name == "opsd_storage_mount_info"}

    before = mounts()
    ranks = built["ranks"]
    assert isinstance(ranks, RanksCollector)
    ranks.collect()
    assert ranks.folders == ("/proc/run",)
    assert mounts() - before == {"/proc"}


# How often the agent looks for a kind of fault whose looks take long.


class Looks:
    """A runbook whose looks take the seconds of processor time ``costs``, in turn, the last one from then on."""

    def __init__(self, *costs: float, look_every_s: float = 0.0) -> None:
        self.costs, self.used_s, self.times = list(costs), 0.0, list[float]()
        book = Runbook(self._detect, lambda *_: False, look_every_s=look_every_s, kind="trouble")
        self._judge = Judge([book], SILENT, used_s=lambda: self.used_s)

    def _detect(self, view: View) -> Iterator[Finding]:
        self.times.append(view.now)
        self.used_s += self.costs.pop(0) if len(self.costs) > 1 else self.costs[0]
        yield finding(kind="trouble")

    def run(self, seconds: int) -> list[float]:
        """A tick each second; the seconds of the looks. There is a finding in every tick."""
        window = Window("node", seconds=60)
        for second in range(seconds):
            window.begin(float(second), 1e9 + second)
            assert len(self._judge.findings(window)) == 1
        return self.times


def test_a_cheap_look_is_taken_in_every_tick() -> None:
    """What is less than its share costs nothing."""
    assert len(Looks(SHARE / 2).run(20)) == 20


def test_a_look_that_is_long_once_is_not_put_off() -> None:
    """It was the first, or something else took the processor."""
    assert len(Looks(5.0, 0.001, 0.001, 5.0, 0.001).run(20)) == 20


def test_looks_that_take_long_have_their_share() -> None:
    """Their findings stay valid meanwhile; the wait has a limit."""
    assert Looks(0.1).run(20) == [0.0, 1.0, 6.0, 11.0, 16.0]
    assert Looks(60.0).run(40) == [0.0, 1.0, 1.0 + LONGEST_WAIT_S, 1.0 + 2 * LONGEST_WAIT_S]


def test_the_interval_of_the_runbook_stands() -> None:
    """Unless the share asks for a longer one."""
    assert Looks(0.02, look_every_s=5.0).run(12) == [0.0, 5.0, 10.0]


def test_a_tick_has_its_share_and_what_waits_is_first_in_the_next() -> None:
    """Nothing is put off for good."""
    used, looked = 0.0, list[tuple[float, str]]()

    def detect(kind: str, view: View) -> Iterator[Finding]:
        nonlocal used
        looked.append((view.now, kind))
        used += 0.7 * TICK_S
        return iter(())

    books = [Runbook(partial(detect, kind), lambda *_: False, kind=kind) for kind in "abcde"]
    judge, window = Judge(books, SILENT, used_s=lambda: used), Window("node", seconds=60)
    for second in range(3):
        window.begin(float(second), 1e9 + second)
        judge.findings(window)
    assert looked == [(0, "a"), (0, "b"), (1, "c"), (1, "d"), (2, "e"), (2, "a")]


def test_waiting_takes_no_processor_time() -> None:
    """Work does, short or long."""
    used = ProcessorTime()
    began = used()
    time.sleep(0.3)
    waited = used() - began
    assert waited < 0.2
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        used()
    assert used() - began - waited > 0.04
