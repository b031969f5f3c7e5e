"""Counters that wrap or start over become counters that only grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import MonotonicCounter


@given(st.lists(st.integers(0, 1 << 29), min_size=1))
def test_wraps_are_seen_through(steps: list[int]) -> None:
    """A counter of 32 bits that advances by less than an eighth of its range a look is added up exactly."""
    counter, true = MonotonicCounter(), 0
    for step in steps:
        true += step
        total = counter.add("counter", true % (1 << 32), bits=32)
    assert total == true


def test_a_reset_counts_from_zero() -> None:
    """A counter that starts over adds what it has counted since, not what it lost."""
    counter = MonotonicCounter()
    assert [counter.add("counter", raw, bits=32) for raw in (1000, 1500, 20, 25)] == [1000, 1500, 1520, 1525]


@given(st.lists(st.integers(0, 1 << 65)), st.sampled_from([32, 64]))
def test_totals_never_fall(readings: list[int], bits: int) -> None:
    """Whatever is read, wider than the counter included, the total does not go back."""
    counter = MonotonicCounter()
    totals = [counter.add("counter", raw, bits=bits) for raw in readings]
    assert totals == sorted(totals)


def test_keys_are_apart() -> None:
    """Each key has its own total."""
    counter = MonotonicCounter()
    counter.add("a", 5)
    assert counter.add("b", 7) == 7
    assert counter.add("a", 6) == 6
