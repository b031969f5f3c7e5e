"""The throttle clock: exact from a driver's counters, sampled from the mask where they cannot be believed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.nvml.gpu import REASONS, ThrottleClock

SW_THERMAL, POWER_CAP = REASONS["sw_thermal"], REASONS["sw_power_cap"]


def test_every_reason_exists_at_zero_from_the_first_sample() -> None:
    """A counter that first appears at one would hide its first increase."""
    assert ThrottleClock().update(100.0, 0, {}) == dict.fromkeys(REASONS, 0.0)


def test_the_drivers_counter_is_taken_as_it_is() -> None:
    """The counter's own value is exported, so that a restart of the agent loses nothing."""
    clock = ThrottleClock()
    clock.update(1000.0, 0, {"sw_thermal": 40_000_000_000})
    assert clock.update(1001.0, SW_THERMAL, {"sw_thermal": 40_400_000_000})["sw_thermal"] == 40.4


def test_without_a_counter_time_with_the_bit_set_adds_up() -> None:
    """Bits are tested one by one: a combined mask counts for each of its reasons and for no other."""
    clock = ThrottleClock()
    clock.update(10.0, 0, {})
    clock.update(11.0, SW_THERMAL | POWER_CAP | 0x100, {})
    seconds = clock.update(12.5, SW_THERMAL, {})
    assert (seconds["sw_thermal"], seconds["sw_power_cap"], seconds["hw_thermal"]) == (2.5, 1.0, 0.0)


def test_an_unknown_mask_counts_for_nothing() -> None:
    """A driver that does not tell its reasons is not taken for one that throttles."""
    clock = ThrottleClock()
    clock.update(10.0, None, {})
    assert set(clock.update(11.0, None, {}).values()) == {0.0}


def test_a_long_gap_between_samples_is_not_all_throttling() -> None:
    """After a hang of the driver only five seconds are attributed to the reason seen at its end."""
    clock = ThrottleClock()
    clock.update(10.0, SW_THERMAL, {})
    assert clock.update(310.0, SW_THERMAL, {})["sw_thermal"] == 5.0


def test_a_counter_beyond_the_uptime_is_given_up() -> None:
    """A field number that means something else on this driver answers with a number that cannot be a duration."""
    clock = ThrottleClock()
    seconds = clock.update(500.0, 0, {"hw_thermal": 10**15})
    assert seconds["hw_thermal"] == 0.0
    assert clock.sampled == {"hw_thermal"}


def test_a_counter_faster_than_time_is_given_up() -> None:
    """From then on the mask is sampled, on top of the last value that could be believed."""
    clock = ThrottleClock()
    clock.update(500.0, 0, {"hw_thermal": 10**9})
    clock.update(501.0, 0, {"hw_thermal": 60 * 10**9})
    assert clock.update(502.0, REASONS["hw_thermal"], {"hw_thermal": 61 * 10**9})["hw_thermal"] == 2.0


def test_a_counter_that_stands_still_while_throttling_is_given_up() -> None:
    """A driver that answers the field but never counts would hide the throttling for ever."""
    clock = ThrottleClock()
    for second in range(30):
        seconds = clock.update(100.0 + second, SW_THERMAL, {"sw_thermal": 0})
    assert clock.sampled == {"sw_thermal"}
    assert seconds["sw_thermal"] > 15.0


def test_a_counter_that_was_reset_is_still_believed() -> None:
    """Reloading the driver starts its counters again at zero."""
    clock = ThrottleClock()
    clock.update(500.0, 0, {"sw_thermal": 90 * 10**9})
    assert clock.update(501.0, SW_THERMAL, {"sw_thermal": 10**8})["sw_thermal"] == 0.1
    assert not clock.sampled


@given(st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(0, 0x1FF)), min_size=1, max_size=40))
def test_sampled_time_never_exceeds_the_time_that_passed(samples: list[tuple[float, int]]) -> None:
    """Whatever the mask does, no reason is active for longer than the clock ran, and none runs backwards."""
    clock, now, before = ThrottleClock(), 0.0, dict.fromkeys(REASONS, 0.0)
    for elapsed, mask in samples:
        now += elapsed
        seconds = clock.update(now, mask, {})
        assert all(before[reason] <= seconds[reason] <= now + 1e-9 for reason in REASONS)
        before = dict(seconds)
