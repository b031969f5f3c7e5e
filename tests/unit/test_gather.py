"""Gathering: whatever one collector does, the others and the loop go on, and it shows."""

from __future__ import annotations

import time

import pytest

from opsd.agent.gather import CPU_BURST_S, LIMITED_S, MAX_EVENTS, MAX_SAMPLES, Gatherer, Health
from opsd.collectors.base import Event, NoData, Reading, Sample
from tests.fakes.clock import FakeClock, eventually
from tests.fakes.collectors import VALUE, FakeCollector, HangingCollector

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
