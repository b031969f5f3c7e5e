"""The learning-rate schedule."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.trainer.settings import ScheduleSettings
from opsd.trainer.train import rate_factor

SCHEDULE = ScheduleSettings(warmup=10, decay_start=100, decay_end=120)


@pytest.mark.parametrize(
    ("step", "factor"), [(1, 0.1), (10, 1.0), (11, 1.0), (100, 1.0), (101, 0.95), (110, 0.5), (120, 0.0), (500, 0.0)]
)
def test_phases(step: int, factor: float) -> None:
    """Linear up to the end of the warm-up, flat, linear down to 0 at the end of the decay."""
    assert rate_factor(step, SCHEDULE) == pytest.approx(factor)


@given(step=st.integers(1, 200), extension=st.integers(0, 10**6))
def test_extension_leaves_the_past_alone(step: int, extension: int) -> None:
    """Moving the decay of a run that is extended changes no step before the old decay."""
    moved = SCHEDULE.model_copy(
        update={"decay_start": SCHEDULE.decay_start + extension, "decay_end": SCHEDULE.decay_end + extension}
    )
    if step <= SCHEDULE.decay_start:
        assert rate_factor(step, moved) == rate_factor(step, SCHEDULE)


def test_no_warmup() -> None:
    """Without warm-up the first step has the full rate."""
    assert rate_factor(1, ScheduleSettings(warmup=0, decay_start=5, decay_end=6)) == 1.0


@pytest.mark.parametrize(
    ("step", "factor"), [(5, 0.5), (10, 1.0), (110, 0.55), (210, 0.1), (10_000, 0.1), (60, 0.1 + 0.9 * 0.853553)]
)
def test_cosine(step: int, factor: float) -> None:
    """Half a cosine from the end of the warm-up down to the floor, at which it stays."""
    cosine = ScheduleSettings(kind="cosine", warmup=10, decay_end=210, floor=0.1)
    assert rate_factor(step, cosine) == pytest.approx(factor)


@pytest.mark.parametrize(("step", "factor"), [(5, 0.5), (99, 1.0), (100, 0.1), (199, 0.1), (200, 0.01), (999, 0.01)])
def test_multi_step(step: int, factor: float) -> None:
    """Constant between milestones, a tenth from each on."""
    steps = ScheduleSettings(kind="multi-step", warmup=10, milestones=(100, 200))
    assert rate_factor(step, steps) == pytest.approx(factor)


def test_floor_of_the_decay() -> None:
    """WSD ends at the floor where one is set."""
    floored = SCHEDULE.model_copy(update={"floor": 0.2})
    assert [rate_factor(step, floored) for step in (110, 120, 500)] == pytest.approx([0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    ("decay", "factors"), [("linear", [0.75, 0.5, 0.25]), ("1-sqrt", [0.5, 0.292893, 0.133975]),
                           ("cosine", [0.853553, 0.5, 0.146447])],
)  # fmt: skip
def test_shapes_of_the_decay(decay: Literal["linear", "1-sqrt", "cosine"], factors: list[float]) -> None:
    """A quarter, half and three quarters into the decay, between the same ends."""
    schedule = SCHEDULE.model_copy(update={"decay": decay})
    assert [rate_factor(step, schedule) for step in (105, 110, 115)] == pytest.approx(factors, abs=1e-6)
    assert [rate_factor(step, schedule) for step in (10, 100, 120, 500)] == [1.0, 1.0, 0.0, 0.0]


def test_only_wsd_has_a_shape() -> None:
    """A shape beside a schedule that has its own is refused."""
    problem = ScheduleSettings(kind="cosine", warmup=1, decay_end=9, decay="1-sqrt").problem()
    assert problem == "schedule.decay 1-sqrt needs schedule.kind wsd"
