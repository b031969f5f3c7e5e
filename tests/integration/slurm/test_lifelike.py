"""`opsd simulate` beside the cluster; `opsd bench simulate` does the same with twenty sequences."""

from __future__ import annotations

import pytest

from tests.integration.slurm import lifelike, lifelike_times
from tests.integration.slurm.cluster import missing

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(900)]

SEEDS = (3, 4)
"""One sequence goes through the queue, the other has a spare inside the job."""


def test_the_simulator_stands_still_as_long_as_the_cluster() -> None:
    """And loses as many steps, within the tolerance of a single sequence for each of the two."""
    if reason := missing():
        pytest.skip(reason)
    notes: list[str] = []
    found = lifelike_times.compare(SEEDS, notes.append)
    real = sum(one.real.standstill_s for one in found)
    simulated = sum(one.simulated.standstill_s for one in found)
    slack_s = len(found) * lifelike.SLACK_S
    assert simulated == pytest.approx(real, rel=lifelike.TOLERANCE, abs=slack_s), notes
    lost = sum(one.real.lost_steps for one in found)
    told = sum(one.simulated.lost_steps for one in found)
    assert told == pytest.approx(lost, rel=lifelike.TOLERANCE, abs=slack_s / lifelike.STEP_S), notes
