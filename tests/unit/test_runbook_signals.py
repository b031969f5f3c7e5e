"""The statistics that runbooks judge by."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.runbooks.lib.signals import excess, integer, number, seconds_spent, spread, text


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
