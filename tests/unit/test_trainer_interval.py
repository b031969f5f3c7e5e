"""When the next checkpoint is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.checkpoints.interval import daly
from opsd.trainer.saving import FIRST_S, LEAST_S, Interval
from opsd.trainer.settings import CheckpointSettings


@given(stall=st.floats(1e-3, 100), mttf=st.floats(2e4, 1e7))
def test_the_interval_loses_least(stall: float, mttf: float) -> None:
    """No interval that is a fifth shorter or longer takes less time for the same work."""

    def time_per_work(seconds: float) -> float:
        """Expected seconds for a second of work, restarts being free (Daly 2006, eq. 13)."""
        return mttf * math.expm1((seconds + stall) / mttf) / seconds

    best = daly(stall, mttf)
    assert time_per_work(best) <= time_per_work(best * 0.8)
    assert time_per_work(best) <= time_per_work(best * 1.2)


def test_a_slow_save() -> None:
    """A stall of 5 minutes and a failure a day call for a save every 115 minutes."""
    assert daly(300, 86400) / 60 == pytest.approx(115, abs=3)


def test_steps() -> None:
    """An interval in steps depends on nothing else."""
    interval = Interval(CheckpointSettings(every=20), 0)
    assert [step for step in range(1, 61) if interval.due(step, 1e9)] == [20, 40, 60]


def test_minutes() -> None:
    """An interval in minutes counts from the beginning of the save before."""
    interval = Interval(CheckpointSettings(minutes=2), 100)
    assert not interval.due(1, 219)
    assert interval.due(1, 220)
    interval.saved(220, 5)
    assert not interval.due(2, 339)
    assert interval.due(2, 340)


def test_measured_stalls() -> None:
    """With a mean time to failure the interval follows from the median stall, after a first save at a fixed time."""
    interval = Interval(CheckpointSettings(mttf_hours=24), 0)
    assert interval.seconds == FIRST_S
    for stall in (2.0, 2.0, 500.0):
        interval.saved(0, stall)
    assert interval.seconds == pytest.approx(daly(2.0, 86400))
    short = Interval(CheckpointSettings(mttf_hours=24), 0)
    short.saved(0, 1e-6)
    assert short.seconds == LEAST_S
