"""The restart benchmark measures what it says."""

from __future__ import annotations

import pytest

from opsd.bench import restart


@pytest.mark.long
@pytest.mark.timeout(420)  # torchrun's own restart hangs now and then, and is given up only after two minutes
def test_one_trial() -> None:
    """A single trial fills every key, and what it measures hangs together."""
    result = {key: float(value) for key, value in restart.run(trials=1).items()}
    assert 0 < result["ours_noticed_p50_s"] < result["ours_restart_p50_s"]
    if result["torchrun_failed"] < restart.PEER_ATTEMPTS:
        assert result["ratio_restart"] == result["ours_restart_p50_s"] / result["torchrun_restart_p50_s"]
    assert result["ours_hang_named_s"] > 0.5 * result["ours_hang_limit_s"] >= 2.5
    assert 5 < result["ours_rss_mib"] <= 60
