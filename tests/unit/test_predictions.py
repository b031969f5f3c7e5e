"""Predictions of slow failures: they beat the noise and find what really grows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.runbooks import RUNBOOKS
from opsd.runbooks.fan_failing import OPEN_AFTER_S, RUNBOOK
from opsd.runbooks.lib.signals import (
    blocks,
    by_step,
    condensed,
    due,
    excess,
    integer,
    number,
    seconds_spent,
    slope,
    spread,
    text,
    thirds,
    trend,
)
from tests.fakes import noise as series
from tests.fakes.noise import DRAWS, HOURS, MODELS, Fault, Healthy, Noise, Tracks, gpu_node, opened

# Predictions from counters, wear, space and latencies beat their noise, and find what really grows.


BOOKS = {book.kind: book for book in RUNBOOKS}

HEALTHY: dict[str, Healthy] = {
    "gpu_ecc_trend": series.memory_errors,
    "nic_degrading": series.link_errors,
    "nvme_failing": series.drive,
    "storage_full": series.disk,
    "storage_slow": series.latencies,
}

LOOK_S = 30.0

ECC = ("opsd_gpu_ecc_errors_total", {"UUID": "GPU-0", "gpu": "0", "type": "corrected", "counter": "volatile"})

PORT = ("opsd_ib_errors_total", {"device": "mlx5_0", "port": "1", "error": "symbol_error"})


def alarms(kind: str, hours: float) -> dict[int, float]:
    """The second of the first incident on each of fifty healthy nodes that has one."""
    found = {n: opened(BOOKS[kind], HEALTHY[kind](n), hours * 3600.0, LOOK_S) for n in range(DRAWS)}
    return {number: at for number, at in found.items() if at is not None}


@pytest.mark.parametrize("kind", HEALTHY)
def test_fifty_healthy_nodes_have_no_incident_in_half_an_hour(kind: str) -> None:
    """Errors in clusters, bursts, checkpoints, files that come and go, loads that wander."""
    assert alarms(kind, 0.5) == {}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", HEALTHY)
def test_fifty_healthy_nodes_have_no_incident_in_72_hours(kind: str) -> None:
    """Each of them for 72 hours."""
    assert alarms(kind, HOURS) == {}


@pytest.mark.parametrize("number", range(5))
def test_memory_errors_that_really_grow(number: int) -> None:
    """By five a minute each minute: within ten minutes."""
    at = opened(BOOKS["gpu_ecc_trend"], series.growing_counter(*ECC, 1200.0, 5.0, number), 3600.0)
    assert at is not None and 1200.0 <= at <= 1800.0


@pytest.mark.parametrize("number", range(5))
def test_bit_errors_that_really_grow(number: int) -> None:
    """By one a minute each minute: within ten minutes."""
    at = opened(BOOKS["nic_degrading"], series.growing_counter(*PORT, 1200.0, 1.0, number), 3600.0)
    assert at is not None and 1200.0 <= at <= 1800.0


def test_a_drive_that_is_written_to_death() -> None:
    """At 3 GB/s it lasts eleven days: found when that has lasted for three hours."""
    at = opened(BOOKS["nvme_failing"], series.drive_written_to_death(3e9), 6 * 3600.0)
    assert at is not None and 3 * 3600.0 <= at - 600.0 <= 3.5 * 3600.0


@pytest.mark.parametrize(("share_an_hour", "within_s"), [(0.5, 1300.0), (1.0, 1000.0), (2.0, 600.0)])
def test_a_disk_that_really_fills_up(share_an_hour: float, within_s: float) -> None:
    """Found in good time: with minutes left if it takes twelve, half an hour if it takes an hour."""
    at = opened(BOOKS["storage_full"], series.disk_filling(share_an_hour), 7200.0)
    assert at is not None and at <= within_s
    assert (0.4 - share_an_hour * at / 3600.0) / share_an_hour * 3600.0 >= 240.0


# The prediction of a failing fan beats the noise of temperatures: fifty healthy nodes, and fans that really fail.


FAN_LOOK_S = 10

FAN_HOURS = 72.0


def fan_opened(node: Iterator[Tracks], seconds: int) -> float | None:
    """The second at which the incident opens: once the fan is found failing for long enough without a break."""
    since = None
    for view in islice(node, seconds):
        if view.now % FAN_LOOK_S:
            continue
        since = (view.now if since is None else since) if list(RUNBOOK.detect(view)) else None
        if since is not None and view.now - since >= OPEN_AFTER_S:
            return view.now
    return None


@pytest.mark.parametrize("number", [0, 10, 18, 32, 40, 46])
def test_a_noisy_node_has_no_failing_fan(number: int) -> None:
    """A quarter of an hour of some of the fifty; all of them for 72 hours is a long test."""
    assert fan_opened(gpu_node(MODELS[number], number), 900) is None


def test_what_others_wander_is_seen_where_they_are_seldom_settled() -> None:
    """Loads and temperatures that wander for minutes: one GPU climbs 6 K, while its peers have few blocks alike."""
    noise = Noise(ar_sd=2.2, ar_s=200.0, load_sd=33.0, load_s=200.0)
    assert fan_opened(gpu_node(noise, 509), 700) is None


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_fifty_noisy_nodes_have_no_failing_fan_in_72_hours(number: int) -> None:
    """AR(1) noise, walking and changing loads, warm rooms, whole degrees, missing and wild samples."""
    assert fan_opened(gpu_node(MODELS[number], 300 + number), int(FAN_HOURS * 3600 / len(MODELS))) is None


def ramp(celsius_a_minute: float) -> Fault:
    """GPU 2 becomes hotter from second 300 on."""
    return lambda gpu, second: max(0.0, second - 300.0) / 60.0 * celsius_a_minute if gpu == 2 else 0.0


def stop(celsius: float, seconds: float) -> Fault:
    """The fan of GPU 2 stops at second 300."""
    return lambda gpu, second: celsius * (1.0 - math.exp(-max(0.0, second - 300.0) / seconds)) if gpu == 2 else 0.0


@pytest.mark.parametrize(
    ("fault", "within_s"),
    [(ramp(2.0), 480), (ramp(1.0), 660), (stop(18.0, 150.0), 420)],
    ids=["two degrees a minute", "one degree a minute", "stopped"],
)
@pytest.mark.parametrize(
    "noise", [Noise(), Noise(step=1.0), Noise(peers=4)], ids=["quiet", "whole degrees", "four GPUs"]
)
def test_a_fan_that_fails_is_found(noise: Noise, fault: Fault, within_s: float) -> None:
    """Within minutes, on a node with the usual noise."""
    at = fan_opened(gpu_node(noise, 1, fault), 300 + int(within_s))
    assert at is not None and at >= 300


# The trends that slow failures are predicted by.


steps = st.floats(-1e3, 1e3, allow_nan=False)


@dataclass
class Ticks:
    """A series by the times of its samples."""

    times: list[float]
    labels: dict[str, str] = field(default_factory=dict)
    last: float = 0.0

    def values(self, seconds):
        return [(at, 0.0) for at in self.times]

    def unchanged(self, seconds):
        return False

    def increase(self, seconds):
        return 0.0


@given(steps, steps, st.integers(3, 30))
def test_points_on_a_line_give_the_line(steep, start, count):
    """Slope and rise are the line's own, and nothing scatters."""
    found = trend([(x, start + steep * x) for x in range(count)])
    assert found.slope == pytest.approx(steep, abs=1e-6)
    assert found.rise == pytest.approx(steep * (count - 1), abs=1e-4)
    assert found.noise == pytest.approx(0, abs=1e-6)


def test_a_quarter_of_wild_points_does_not_bend_the_line():
    """That is why it is not a least-squares fit."""
    points = [(x, 1e6 if x % 4 == 0 else 2.0 * x) for x in range(40)]
    assert slope(points) == pytest.approx(2.0, rel=0.1)


def test_noise_is_no_trend():
    """What goes up and down by turns does not stand out from its own scatter."""
    assert not trend([(x, float(x % 2)) for x in range(20)]).sure
    assert trend([(x, 0.5 * x + x % 2) for x in range(20)]).sure


def test_points_of_one_moment_have_no_slope():
    """Nothing is divided by zero."""
    assert slope([(1.0, 2.0), (1.0, 9.0)]) == 0.0


def test_blocks_have_the_same_numbers_for_every_series():
    """Series that were sampled at different moments can be compared block by block."""
    assert blocks([(100, 1), (101, 9), (109, 2), (110, 5)], 10) == {10: 2, 11: 5}


@pytest.mark.parametrize("interval", [0.5, 1.0, 3.0, 5.0])
@pytest.mark.parametrize("phase", [0.0, 0.7, 3.3])
def test_a_look_is_due_once_in_ten_seconds_however_the_ticks_lie(interval, phase):
    """The agent's interval can be set, and its ticks begin whenever it was started."""
    times = [phase + 100 + interval * n for n in range(int(100 / interval))]
    looks = sum(due(Ticks([before, at]), 10.0) for before, at in pairwise(times))
    assert looks in (9, 10)


def test_thirds_show_the_course():
    """First, middle and last third by their medians."""
    assert thirds([1, 1, 9, 2, 2, 2, 3, 3, 3]) == (1, 2, 3)


@dataclass
class Values:
    """A series by its samples."""

    samples: list[tuple[float, float]]

    def values(self, seconds):
        return self.samples


@dataclass
class TwoSeries:
    """A view of a rank's steps and losses, second by second."""

    steps: list[float]
    losses: list[float]

    def select(self, metric, **labels):
        assert labels == {"run": "smol", "rank": "0"}
        return [Values(list(enumerate(self.steps if metric == "opsd_rank_step" else self.losses)))]


def test_a_step_that_is_seen_twice_counts_once():
    """Slow steps are sampled many times; that gives them no weight."""
    view = TwoSeries([7, 7, 7, 8, 9], [2.5, 2.5, 2.5, 2.4, 2.3])
    assert by_step(view, "opsd_rank_loss", "smol", 0) == [(7, 2.5), (8, 2.4), (9, 2.3)]


def test_what_a_rank_does_again_replaces_what_it_did():
    """After a restart the course begins with the step that the rank went back to."""
    view = TwoSeries([7, 8, 9, 5, 6], [2.5, 2.4, 9.9, 2.6, 2.5])
    assert by_step(view, "opsd_rank_loss", "smol", 0) == [(5, 2.6), (6, 2.5)]


@given(st.lists(st.tuples(steps, steps)), st.integers(1, 30))
def test_points_are_condensed_to_the_wanted_number_of_groups(points, count):
    """Many points become few, few stay as they are."""
    found = condensed(points, count)
    assert len(found) == len(points) if len(points) < 2 * count else count <= len(found) < 2 * count


# The statistics that runbooks judge by.


@dataclass
class Points:
    """A series given by its points; every look sees all of them."""

    points: list[tuple[float, float]]
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def last(self):
        return self.points[-1][1]

    def values(self, seconds):
        return self.points

    def unchanged(self, seconds):
        return False

    def increase(self, seconds):
        return self.points[-1][1] - self.points[0][1]


def test_a_counter_of_seconds_is_read_as_it_stands():
    """Throttled for half of every second is half of the time."""
    assert seconds_spent(Points([(t, 100 + t / 2) for t in range(11)]), 10) == pytest.approx(5)


@pytest.mark.parametrize("values", [[7, 8, 0, 1, 2], [7, 8, 4e9, 8, 9]])
def test_a_reset_or_a_wild_sample_counts_one_interval_at_most(values):
    """No counter of seconds grows faster than time, and none grows by falling."""
    assert seconds_spent(Points(list(enumerate(values))), 10) == pytest.approx(3)


@given(st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=50))
def test_whatever_a_counter_says_it_never_adds_up_to_more_than_the_time(values):
    """The result lies between nothing and the length of the window."""
    assert 0 <= seconds_spent(Points(list(enumerate(values))), 100) <= len(values) - 1


def test_one_outlier_does_not_move_the_spread():
    """That is what the median absolute deviation is for."""
    calm = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert spread([*calm, 1000.0]) == pytest.approx(spread(calm), rel=0.7)


def test_excess_is_relative_to_the_median_of_the_peers():
    """A rank that takes 1.1 s where its peers take 1 s is 10 % slow; peers at zero compare with nothing."""
    assert excess(1.1, [1.0, 1.0, 9.0]) == pytest.approx(0.1)
    assert excess(1.0, [0.0, 0.0]) == 0.0


def test_event_fields_of_the_wrong_type_are_treated_as_missing():
    """Events come from files that a user can write."""
    data = {"a": None, "b": "7", "c": True, "d": 7.9}
    assert text(data, "a") == "" and text(data, "b") == "7" and text(data, "missing") == ""
    assert number(data, "b") is None and number(data, "c") is None and number(data, "d") == 7.9
    assert [number({"x": odd}, "x") for odd in (math.nan, math.inf, 10**400)] == [None] * 3
    assert integer(data, "a") == -1 and integer(data, "d") == 7 and integer(data, "b", 3) == 3
