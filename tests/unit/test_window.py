"""The window: what runbooks read is what collectors delivered, whatever the values, the gaps and the resets."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent import window as module
from opsd.agent.window import MAX_GONE, MAX_TOLD, MAX_WITNESSED, USER_BYTES, USERS_BYTES, Window
from opsd.collectors.base import Event, GpuFact, Metric, Reading, Sample

GAUGE = Metric("temperature", "help", labels=("gpu",))
COUNTER = Metric("energy_total", "help", "counter", labels=("gpu",))


def feed(window: Window, ticks: list[float | None], metric: Metric = GAUGE, labels: tuple[str, ...] = ("0",)) -> None:
    """One tick a second; None is a tick without a sample."""
    for number, value in enumerate(ticks):
        window.begin(100.0 + number, 1e9 + number)
        if value is not None:
            window.add("nvml", Reading((Sample(metric, value, labels),)))


finite = st.floats(-1e15, 1e15, allow_nan=False).filter(lambda v: v == 0 or abs(v) > 1e-6)


@given(st.lists(st.none() | finite, min_size=1, max_size=40))
def test_values_are_those_of_the_window_within_its_precision(ticks: list[float | None]) -> None:
    """Every sample of the last ten ticks comes back with its time, rounded by no more than the window promises."""
    window = Window("node", seconds=10)
    feed(window, ticks)
    expected = [(100.0 + i, v) for i, v in enumerate(ticks) if v is not None and i >= len(ticks) - 11]
    series = window.select("temperature")
    got = series[0].values(10) if series else []
    assert [at for at, _ in got] == [at for at, _ in expected]
    span = 2 * max((abs(v) for v in ticks if v is not None), default=0.0)
    tolerance = span * 2**-22 + 1e-6
    assert [v for _, v in got] == pytest.approx([v for _, v in expected], abs=tolerance, rel=0)


@given(st.lists(finite, min_size=1, max_size=30))
def test_the_newest_value_is_exact(ticks: list[float]) -> None:
    """``last`` is the value that the collector delivered, bit for bit."""
    window = Window("node", seconds=10)
    feed(window, [*ticks])
    assert window.select("temperature")[0].last == ticks[-1]


@given(st.lists(st.none() | st.sampled_from([1.0, 2.0, math.nan]), min_size=1, max_size=40), st.integers(1, 10))
def test_unchanged_values_are_equal(ticks: list[float | None], seconds: int) -> None:
    """What is said without a look at the values is what they say."""
    window = Window("node", seconds=10)
    feed(window, ticks)
    for series in window.select("temperature"):
        assert not series.unchanged(seconds) or len({v for _, v in series.values(seconds)}) <= 1


def test_a_value_is_unchanged_once_its_change_has_left_the_seconds() -> None:
    """Otherwise every value would be looked at in each tick."""
    window = Window("node", seconds=10)
    feed(window, [1.0, 2.0, 2.0, 2.0, 2.0])
    (series,) = window.select("temperature")
    assert series.unchanged(2)
    assert not series.unchanged(3)
    feed(window, [2.0] * 40)
    assert series.unchanged(10)


def test_a_large_fast_counter_keeps_its_growth() -> None:
    """A counter of bytes at 10**15 that grows by 400 GB/s shows its growth to a part in a million."""
    window = Window("node", seconds=600)
    feed(window, [1e15 + 4e11 * i for i in range(2000)], COUNTER)
    assert window.select("energy_total")[0].increase(60) == pytest.approx(60 * 4e11, rel=1e-6)


def test_a_slow_counter_far_from_zero_keeps_single_steps() -> None:
    """A counter at 10**12 that grows by 1 a second is not rounded away."""
    window = Window("node", seconds=600)
    feed(window, [1e12 + i for i in range(1500)], COUNTER)
    assert window.select("energy_total")[0].increase(10) == 10


def test_growth_counts_from_zero_after_a_reset() -> None:
    """A counter that restarts counts what it has grown since, not a negative number."""
    window = Window("node", seconds=60)
    feed(window, [1e6, 1e6 + 100, 5.0, 8.0], COUNTER)
    assert window.select("energy_total")[0].increase(60) == 108
    assert window.select("energy_total")[0].increase(1.5) == 3


@pytest.mark.parametrize("ticks", [[None], [5.0], [5.0, None, None]])
def test_growth_needs_two_values(ticks: list[float | None]) -> None:
    """With fewer than two values growth is not known, which is not zero."""
    window = Window("node", seconds=60)
    feed(window, ticks, COUNTER)
    assert all(series.increase(60) is None for series in window.select("energy_total"))


def test_a_tick_without_a_sample_has_no_last_value() -> None:
    """The value of an earlier tick is never passed off as the newest."""
    window = Window("node", seconds=60)
    feed(window, [1.0, 2.0, None])
    (series,) = window.select("temperature")
    assert series.last is None
    assert series.values(60) == [(100.0, 1.0), (101.0, 2.0)]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_a_missing_value(odd: float) -> None:
    """Runbooks divide, round and compare."""
    window = Window("node", seconds=60)
    feed(window, [1.0, odd, 2.0])
    (series,) = window.select("temperature")
    assert series.values(60) == [(100.0, 1.0), (102.0, 2.0)]
    feed(window, [odd])
    assert series.last is None


def test_values_too_far_apart_for_the_ring_are_missing_and_not_infinite() -> None:
    """The newest is there, and those that fit with it."""
    window = Window("node", seconds=60)
    feed(window, [1.0, 1e300, 2.0, 1e308, -1e308, 3.0])
    (series,) = window.select("temperature")
    assert series.last == 3.0
    assert series.values(60)[-1] == (105.0, 3.0)
    assert all(map(math.isfinite, (value for _, value in series.values(60))))


def test_series_unseen_for_a_whole_window_are_dropped() -> None:
    """A GPU that was taken out does not stay in memory for ever."""
    window = Window("node", seconds=10)
    feed(window, [1.0, *[None] * 12])
    assert window.select("temperature") == []
    assert len(window) == 0


def test_select_matches_labels() -> None:
    """A label that is asked for must be there and equal."""
    window = Window("node", seconds=10)
    window.begin(1.0, 1.0)
    window.add("nvml", Reading((Sample(GAUGE, 60.0, ("0",)), Sample(GAUGE, 70.0, ("1",)))))
    assert [series.last for series in window.select("temperature", gpu="1")] == [70.0]
    assert [series.labels for series in window.select("temperature")] == [{"gpu": "0"}, {"gpu": "1"}]
    assert window.select("temperature", uuid="1") == []
    assert window.select("nothing") == []


def test_events_are_those_of_the_last_seconds_in_order() -> None:
    """Events are selected by when they happened, not by when they were read."""
    window = Window("node", seconds=60)
    window.begin(10.0, 1000.0)
    late, early, old = (Event("xid", at, "") for at in (999.0, 995.0, 900.0))
    window.add("kmsg", Reading(events=(late, early, old, Event("oom", 999.0, ""))))
    window.begin(11.0, 1001.0)
    assert window.events("xid", 30) == [early, late]


def test_a_flood_of_events_leaves_those_of_other_kinds() -> None:
    """What a user's trainer writes must not hide an Xid from the runbooks."""
    window = Window("node", seconds=60)
    window.begin(10.0, 1000.0)
    xid = Event("xid", 999.0, "")
    window.add("kmsg", Reading(events=(xid,)))
    window.add(
        "ranks", Reading(events=tuple(Event("evaluation", 999.5, str(number)) for number in range(MAX_TOLD + 1)))
    )
    assert window.events("xid", 30) == [xid]
    assert len(window.events("evaluation", 30)) == MAX_TOLD


def test_a_flood_of_one_users_events_leaves_those_of_others() -> None:
    """Of the same kind, however often they come."""
    window = Window("node", seconds=60)
    window.begin(10.0, 1000.0)
    mine = Event("rank_exited", 999.0, "", user=1000)
    window.add("ranks", Reading(events=(mine,)))
    window.add(
        "ranks",
        Reading(events=tuple(Event("rank_exited", 999.5, str(number), user=1001) for number in range(MAX_TOLD))),
    )
    assert mine in window.events("rank_exited", 30)
    assert len(window.events("rank_exited", 30)) == MAX_TOLD


def test_a_flood_of_told_events_leaves_the_witnessed_ones_of_the_same_kind() -> None:
    """However many the witness has told; it is bounded on its own."""
    window = Window("node", seconds=60, witnesses=frozenset({"kmsg"}))
    window.begin(10.0, 1000.0)
    window.add("kmsg", Reading(events=tuple(Event("xid", 999.0, "kernel") for _ in range(MAX_WITNESSED + 1))))
    window.add(
        "ranks", Reading(events=tuple(Event("xid", 999.5, str(number), user=1001) for number in range(MAX_TOLD + 1)))
    )
    assert len(window.witnessed.events("xid", 30)) == MAX_WITNESSED
    assert len(window.events("xid", 30)) == MAX_WITNESSED + MAX_TOLD


def test_what_is_kept_of_users_events_has_a_size() -> None:
    """A few large events of one user fill no memory; nobody's share is taken for those of another."""
    window = Window("node", seconds=60)
    window.begin(10.0, 1000.0)
    for user in range(1000, 1008):
        small = Event("finished", 990.0, "", {"run": str(user)}, user, 200)
        large = (Event("evaluation", 999.0, str(n), {"run": str(user)}, user, USER_BYTES // 10) for n in range(40))
        window.add("ranks", Reading(events=(small, *large)))
    assert [event.user for event in window.events("finished", 30)] == [*range(1000, 1008)]
    kept = [event for kind in ("finished", "evaluation") for event in window.events(kind, 30)]
    assert max(sum(e.size for e in kept if e.user == user) for user in range(1000, 1008)) <= USER_BYTES
    assert USERS_BYTES // 2 < sum(event.size for event in kept) <= USERS_BYTES


def test_the_same_word_of_a_run_counts_once() -> None:
    """A restored folder is read again, also after steps of the clock; what a witness tells twice has happened twice."""
    window = Window("node", seconds=60, witnesses=frozenset({"kmsg"}))
    for step in (0.0, -60.5, 60.0):
        window.begin(10.0, 1000.0)
        window.clock_stepped(step)
        window.add("ranks", Reading(events=(Event("finished", 999.0, "", {"run": "a"}, 1000, 10),)))
        window.add("kmsg", Reading(events=(Event("xid", 999.0, ""),)))
    assert len(window.events("finished", 3600)) == 1
    assert len(window.events("xid", 3600)) == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 99)), max_size=40))
def test_events_about_a_run_are_those_that_name_it(told: list[tuple[str, str, int]]) -> None:
    """Whatever came in between, asked before and after."""
    window = Window("node", seconds=60)
    window.begin(10.0, 100.0)
    for run, kind, at in told:
        window.add("ranks", Reading(events=(Event(kind, float(at), "", {"run": run}),)))
        for kind in "xy":
            all_of_kind = window.events(kind, 50)
            for run in "abc":
                assert [*window.events(kind, 50, run)] == [one for one in all_of_kind if one.data["run"] == run]


def test_series_that_have_ended_are_kept_up_to_a_number() -> None:
    """A user who starts and ends runs all the time takes no more memory than that; the newest stay."""
    window = Window("node", seconds=600)
    for tick in range(80):
        window.begin(float(tick), 1000.0 + tick)
        new = (Sample(GAUGE, 1.0, (f"{tick}-{number}",)) for number in range(200))
        window.add("ranks", Reading((Sample(GAUGE, 2.0, ("stays",)), *new)))
    assert len(window) <= MAX_GONE + 20 * 200
    names = {ring.values_of[0] for ring in window.select("temperature")}
    assert {"stays", "79-0", "62-0"} <= names and "1-0" not in names


def test_facts_outlive_a_missing_tick_but_not_a_failure() -> None:
    """A late collector keeps its facts but is not known; one that failed has none."""
    window = Window("node", seconds=60)
    gpu = GpuFact(0, "GPU-0", "0000:01:00.0", "H100")
    window.begin(1.0, 1.0)
    window.add("nvml", Reading(facts=(gpu,)))
    assert window.known("nvml")
    window.begin(2.0, 2.0)
    assert list(window.gpus) == [gpu]
    assert not window.known("nvml")
    window.forget("nvml")
    assert not window.gpus


def test_series_beyond_the_limit_are_left_out_and_counted() -> None:
    """A label that explodes cannot take the agent's memory."""
    window = Window("node", seconds=1, witnesses=["nvml"])
    window.begin(1.0, 1.0)
    samples = tuple(Sample(GAUGE, 1.0, (str(i),)) for i in range(module.MAX_SERIES + 5))
    window.add("nvml", Reading(samples))
    assert len(window) == module.MAX_SERIES
    assert window.refused == 5


def test_what_users_tell_leaves_room_for_witnesses() -> None:
    """However many series they have."""
    window = Window("node", seconds=1, witnesses=["nvml"])
    window.begin(1.0, 1.0)
    window.add("ranks", Reading(tuple(Sample(GAUGE, 1.0, (f"run-{i}",)) for i in range(module.MAX_TOLD_SERIES + 5))))
    window.add("nvml", Reading((Sample(GAUGE, 1.0, ("0",)),)))
    assert window.refused == 5
    assert window.select("temperature", gpu="0")


def test_runs_that_get_other_names_all_the_time_fill_no_memory() -> None:
    """Eight thousand new series in each tick are as many in the window as those of two ticks, and what has ended."""
    window, most = Window("node", seconds=600), 0
    for tick in range(5):
        window.begin(float(tick), 1000.0 + tick)
        window.add("ranks", Reading(tuple(Sample(GAUGE, 1.0, (f"{tick}-{number}",)) for number in range(8_000))))
        most = max(most, len(window))
    assert most <= MAX_GONE + 2 * 8_000
    assert window.refused == 0


@pytest.mark.parametrize("step", [-3600.0, 3600.0, -31e6, 31e6])
def test_a_step_of_the_clock_makes_no_event_older_or_younger(step: float) -> None:
    """It is there for the rest of its minutes and no longer."""
    window = Window("node", seconds=600)
    window.begin(0.0, 1e9)
    window.add("kmsg", Reading(events=(Event("xid", 1e9, "79", {"run": "r"}),)))
    assert window.events("xid", 60.0, "r")
    window.clock_stepped(step)
    window.begin(50.0, 1e9 + step + 50.0)
    assert len(window.events("xid", 60.0)) == len(window.events("xid", 60.0, "r")) == 1
    window.begin(70.0, 1e9 + step + 70.0)
    assert not window.events("xid", 60.0)


def test_ten_thousand_series_of_ten_minutes_fit_into_30_mib() -> None:
    """The promise of the module's docstring; a ring is as large after three ticks as after six hundred."""
    wide = Metric("wide", "help", labels=("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname"))
    tracemalloc.start()
    try:
        window = Window("node", seconds=600)
        for tick in range(3):
            window.begin(float(tick), float(tick))
            labels = [(str(i), "GPU", "0000", "nvidia", "H100", "node") for i in range(10_000)]
            window.add("nvml", Reading(tuple(Sample(wide, 1e3 * i + tick, of) for i, of in enumerate(labels))))
        window.forget("nvml")
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used <= 30 * 2**20


def test_what_exporters_and_users_tell_is_no_witness() -> None:
    """The witnessed view has the kernel's and the drivers' series and events, the window both."""
    window = Window("node", seconds=10, witnesses=["nvml"])
    window.begin(0.0, 100.0)
    for collector in ("nvml", "dcgm"):
        told = Sample(GAUGE, 1.0, (collector,))
        window.add(collector, Reading((told,), (Event("xid", 100.0, collector),)))
    assert [(series.source, series.labels["gpu"]) for series in window.select(GAUGE.name)] == [
        ("nvml", "nvml"), ("dcgm", "dcgm"),
    ]  # fmt: skip
    assert [series.source for series in window.witnessed.select(GAUGE.name)] == ["nvml"]
    assert [event.message for event in window.witnessed.events("xid", 5.0)] == ["nvml"]
    assert len(window.events("xid", 5.0)) == 2


def test_of_one_series_from_two_sources_the_one_with_a_value_is_there() -> None:
    """The witness's if both have one; neither is there twice."""
    window = Window("node", seconds=10, witnesses=["nvml"])

    def seen(*delivers: str) -> list[str]:
        window.begin(window.now + 1.0, 100.0)
        for collector in delivers:
            window.add(collector, Reading((Sample(GAUGE, 1.0, ("0",)),)))
        return [series.source for series in window.select(GAUGE.name)]

    assert [seen("dcgm"), seen("dcgm", "nvml"), seen("nvml"), seen("dcgm"), seen()] == [
        ["dcgm"], ["nvml"], ["nvml"], ["dcgm"], ["nvml"],
    ]  # fmt: skip
