"""What an agent exports of a file system that is full: that of the network has its mount, as all its nodes tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.agent import metrics
from opsd.scenarios.model import load
from opsd.scenarios.player import play

SCENARIOS = Path(__file__).parents[1] / "scenarios" / "storage_full"


@pytest.mark.parametrize(("scenario", "mount"), [("network_mount", "/results"), ("few_bytes", "")])
def test_only_a_network_file_system_is_told_by_its_mount(scenario: str, mount: str) -> None:
    """An alert is then one for all nodes; a disk of the node stays the node's."""
    played = play(load(SCENARIOS / f"{scenario}.toml"), "observe")
    samples = metrics.runbook_samples(("storage_full",), played.incidents.values(), {}, {})
    shown = [s.labels for s in samples if s.metric is metrics.INCIDENTS and s.value]
    assert shown == [("storage_full", shown[0][1], "open", "", mount)]
