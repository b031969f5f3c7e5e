"""NVML field values, throttle counters and the health of the fabric."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import Sample
from opsd.collectors.lib.nvml import series
from opsd.collectors.lib.nvml.driver import PROBLEMS, fabric_problems
from opsd.collectors.lib.nvml.fields import (
    FIELD_VALUE,
    FieldValue,
    field_plan,
    field_request,
    link_errors,
    link_plan,
    number,
    nvlink_kib,
    parse_fields,
    throttle_counters,
)
from opsd.collectors.lib.nvml.gpu import REASONS, ThrottleClock

# NVML field values: requests, typed numbers, and the throttle counters under every driver's numbering.


U32, U64 = 1, 3


def field(id: int, value: int, *, scope: int = 0, type: int = U64, result: int = 0) -> FieldValue:
    return FieldValue(id, scope, 0, 0, type, result, value)


def raw(*fields: FieldValue) -> bytes:
    return b"".join(FIELD_VALUE.pack(*entry) for entry in fields)


def test_an_entry_has_the_size_of_nvmls_struct() -> None:
    """nvmlFieldValue_t is 40 bytes long on every 64-bit platform."""
    assert FIELD_VALUE.size == 40


def test_a_request_has_its_keys_in_order_and_one_entry_to_spare() -> None:
    """The driver may look one entry past the last NVLink field."""
    request = field_request([(83, 0), (165, 17)])
    assert [entry[:2] for entry in FIELD_VALUE.iter_unpack(request)] == [(83, 0), (165, 17), (0, 0)]


@given(st.integers(-(2**31), 2**31 - 1))
def test_a_signed_int_keeps_its_sign(value: int) -> None:
    """Whatever the driver left in the upper half of the union does not matter."""
    bits = (value & 0xFFFFFFFF) | 0xDEADBEEF << 32
    assert number(5, bits) == value


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_signed_long_keeps_its_sign(value: int) -> None:
    """The widest signed type of a field."""
    assert number(4, value & (2**64 - 1)) == value


@given(st.floats(allow_nan=False))
def test_a_double_is_read_bit_by_bit(value: float) -> None:
    """The union holds the number's own representation."""
    assert number(0, struct.unpack("=Q", struct.pack("=d", value))[0]) == value


def test_unsigned_numbers_ignore_the_rest_of_the_union() -> None:
    """A driver writes only as many bytes as the type has."""
    assert number(U32, 0xFFFFFFFF_00000007) == 7
    assert number(6, 0xFFFF_0009) == 9
    assert number(U64, 2**64 - 1) == 2**64 - 1


def test_answers_go_to_their_series_and_the_rest_is_handed_back() -> None:
    """Refused fields and those that make up a series with others are no samples."""
    answer = raw(field(83, 5000), field(94, 0, result=3), field(74, 12))
    samples, rest = parse_fields(answer, [(series.ENERGY, 1.0, ("0",)), (series.PCIE_REPLAYS, 1.0, ("0",)), None])
    assert samples == [Sample(series.ENERGY, 5000, ("0",))]
    assert [(entry.id, entry.result) for entry in rest] == [(94, 3), (74, 0)]


def test_no_field_is_asked_for_twice_and_links_have_their_own() -> None:
    """A GPU without NVLink is not asked about links."""
    assert len(field_plan(18)) > len(field_plan(0))
    assert not [key for key in [*field_plan(0), *link_plan(0)] if key[0] in (138, 139, 161, 165)]
    assert {link for _, link in link_plan(18)} == {*range(18)}


def test_throttle_counters_of_driver_575() -> None:
    """The headers of CUDA 12.9 have them at 251 to 253 and power smoothing, 32 bits wide, from 256 on."""
    fields = [field(74, 1), field(251, 2), field(252, 3), field(253, 4), field(269, 1, type=U32)]
    assert throttle_counters(fields) == {"sw_power_cap": 1, "sw_thermal": 2, "hw_thermal": 3, "hw_power_brake": 4}


def test_throttle_counters_of_driver_580() -> None:
    """Later headers have them at 269 to 271; 251 to 253 are power smoothing again and must not be taken for them."""
    smoothing = [field(id, 1, type=U32) for id in (251, 252, 253)]
    counters = [field(269, 2), field(270, 3), field(271, 4)]
    wanted = {"sw_thermal": 2, "hw_thermal": 3, "hw_power_brake": 4}
    assert throttle_counters([*smoothing, *counters]) == throttle_counters([*counters, *smoothing]) == wanted


def test_throttle_counters_of_driver_570() -> None:
    """That driver has none for the thermal reasons: power smoothing at 251, unknown numbers above 268."""
    fields = [field(251, 1, type=U32), field(269, 0, result=2), field(76, 9)]
    assert throttle_counters(fields) == {"sync_boost": 9}


def test_the_errors_of_a_link_are_added_up() -> None:
    """Replays, recoveries and CRC errors of one link make one series; a refused counter does not count."""
    fields = [field(161, 2, scope=4), field(162, 1, scope=4), field(163, 3, scope=5), field(161, 7, scope=6, result=3)]
    assert link_errors(fields) == ({4: 3, 5: 3}, {})


def test_links_of_blackwell_have_types_but_no_totals() -> None:
    """Its totals per type are added up from the links."""
    fields = [field(208, 2, scope=0), field(208, 3, scope=17), field(214, 1, scope=17), field(219, 9, result=3)]
    assert link_errors(fields) == ({0: 2, 17: 4}, {"receive": 5, "failed_recovery": 1})


def test_the_bandwidth_total_needs_both_directions() -> None:
    """Half of the traffic shown as all of it would be worse than none."""
    sent, received = Sample(series.NVLINK_SENT, 2048, ()), Sample(series.NVLINK_RECEIVED, 1024, ())
    assert nvlink_kib([sent, received]) == 3.0
    assert nvlink_kib([sent]) is None


# The throttle clock: exact from a driver's counters, sampled from the mask where they cannot be believed.


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


# The health mask of the NVLink fabric.


def problems(health: int) -> dict[str, bool]:
    return {name: told for name, told in zip(PROBLEMS, fabric_problems(health), strict=True) if told is not None}


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        (0, {}),
        (0b01, {"degraded_bandwidth": True}),
        (0b10_10_10_10, dict.fromkeys(list(PROBLEMS)[:4], False)),
        (0b01 << 2 | 0b10 << 4 | 0b01 << 6, {"route_recovery": True, "route_unhealthy": False,
                                             "access_timeout_recovery": True}),
        (1 << 8, {"incorrect_configuration": False}),
        (5 << 8, {"incorrect_configuration": True}),
    ],
)  # fmt: skip
def test_only_what_the_hardware_tells_is_an_answer(health: int, expected: dict[str, bool]) -> None:
    """In each group of bits 0 is no answer; the configuration has 1 for a good one and the kinds of bad ones above."""
    assert problems(health) == expected


@given(st.integers(0, 2**32 - 1))
def test_any_mask_has_an_answer_for_each_problem(health: int) -> None:
    """Bits of newer drivers change nothing."""
    assert len(fabric_problems(health)) == len(PROBLEMS)
