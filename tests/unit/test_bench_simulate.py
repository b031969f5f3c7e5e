"""What the benchmark of the simulator measures on the cluster is what the simulator then takes."""

from __future__ import annotations

import pytest

from opsd.simulate.faults import Effect
from tests.integration.slurm.lifelike import EVERY, LAST_S, STEP_S, Strike, draw, simulated
from tests.integration.slurm.lifelike_times import fitted

MEANS_S = {
    "hot process": 0.3, "hot lost": 1.8, "hot leader": 1.7, "hot hardware": 0.4, "hot launcher": 0.35,
    "requeue lost": 13.0, "requeue leader": 41.0, "pool lost": 6.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "effect", "node", "name"),
    [
        ("hot", "process", 1, "hot process"),
        ("hot", "lost", 1, "hot lost"),
        ("hot", "lost", 0, "hot leader"),
        ("hot", "hardware", 1, "hot hardware"),
        ("hot", "launcher", 1, "hot launcher"),
        ("requeue", "lost", 1, "requeue lost"),
        ("pool", "lost", 1, "pool lost"),
    ],
)
def test_a_single_fault_takes_as_long_as_it_was_measured(policy: str, effect: Effect, node: int, name: str) -> None:
    """And costs the steps since the last checkpoint."""
    at_s = 1.3 * EVERY * STEP_S
    played = simulated(policy, [Strike(at_s, effect, node)], fitted(MEANS_S))
    assert played.standstill_s == pytest.approx(MEANS_S[name], abs=0.05)
    assert played.lost_steps == pytest.approx(0.3 * EVERY)


def test_the_batch_host_is_waited_for_as_long_as_it_was_measured() -> None:
    """Its loss without a spare; the two seconds for which a new leader looks around may be part of it."""
    played = simulated("requeue", [Strike(9.0, "lost", 0)], fitted(MEANS_S))
    assert played.standstill_s == pytest.approx(MEANS_S["requeue leader"], abs=2.5)


def test_sequences_differ_and_come_again() -> None:
    """Each seed has its own, which ends before the time to recover from its last fault."""
    drawn = [draw(seed) for seed in range(30)]
    assert drawn == [draw(seed) for seed in range(30)]
    assert len({strikes for _, strikes in drawn}) > 25
    assert all(strike.at_s < LAST_S for _, strikes in drawn for strike in strikes)
    assert {strike.effect for _, strikes in drawn for strike in strikes} == {
        "process", "hardware", "lost", "launcher", "degraded",
    }  # fmt: skip
