"""The rendezvous benchmark, with few launchers."""

from __future__ import annotations

import pytest

from opsd.bench import rendezvous


@pytest.mark.slow
def test_every_kind_of_loss_is_measured() -> None:
    """Silence is noticed after the timeout, the end of a process sooner; the leader's place is taken."""
    results = rendezvous.run(12, trials=1, idle_s=1.0, settle_s=0.5)
    assert results["nodes"] == 12
    assert 1.0 < results["ours_silent_follower_max_s"] < 60.0
    assert 0.0 < results["ours_killed_follower_max_s"] < 60.0
    assert 1.0 < results["ours_silent_head_max_s"] < 60.0
    assert results["ours_head_idle_cpu_percent"] < 100.0
