"""What a runbook knows of a run from the launcher on this node."""

from __future__ import annotations

import pytest

from opsd.agent.window import Window
from opsd.collectors.base import Reading, RunFact
from opsd.runbooks.lib.runs import recovered
from tests.fakes.facts import rank


def seen(state: str, *ranks: int) -> Window:
    fact = RunFact("smol", "4242", "n1", state, 2, 900, True, 16, "/control", "/folder", "/folder/logs")
    window = Window("n1", interval_s=1.0)
    window.begin(100.0, 1000.0)
    window.add("ranks", Reading(facts=(fact, *map(rank, ranks))))
    return window


@pytest.mark.parametrize(
    ("state", "over"), [("finished", True), ("restarting", False), ("waiting", False), ("spare", None)]
)
def test_a_spare_does_not_know_whether_the_run_goes_on(state: str, over: bool | None) -> None:
    """The node that was swapped out sees nothing of the run any more: its trouble is not kept open by that."""
    assert recovered(seen(state), "smol", 1) is over
