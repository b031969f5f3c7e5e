"""The trends that slow failures are predicted by."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.runbooks.lib.trends import blocks, by_step, condensed, due, slope, thirds, trend

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
