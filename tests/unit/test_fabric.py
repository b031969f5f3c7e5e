"""The health mask of the NVLink fabric."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.nvml.driver import PROBLEMS, fabric_problems


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
