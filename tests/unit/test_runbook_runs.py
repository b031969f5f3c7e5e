"""What a runbook knows of a run from the launcher on this node."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from opsd.agent.window import Window
from opsd.collectors.base import Event, RankFact, Reading, RunFact
from opsd.runbooks import collective_hang
from opsd.runbooks.base import Culprit, Finding, Severity
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


@pytest.mark.parametrize(("user", "named"), [(7, "n9"), (8, None)])
def test_ras_names_the_culprit_of_its_own_users_run_only(user: int, named: str | None) -> None:
    """Any user can listen where RAS does: it tells nothing about the hang of another user's run."""
    silent = {"host": "n9", "pid": 1, "gpu": 0}
    assert culprit_by_ras(silent, rank(0, user=7), user=user).node == named


@pytest.mark.parametrize(("pid", "gpu", "named"), [(12, 1, 1), (12, 3, None), (15, 0, 2), (502, 2, None), (1003, 3, 3)])
def test_ras_names_ranks_by_their_numbers_in_the_container(pid: int, gpu: int, named: int | None) -> None:
    """Ranks of several containers may have the same number: the GPU tells them apart, or it stays open."""
    inside = (rank(0, pid=500, inside=12), rank(1, pid=501, inside=12), rank(2, pid=502, inside=15), rank(3))
    assert culprit_by_ras({"host": "n1", "pid": pid, "gpu": gpu}, *inside).rank == named


def culprit_by_ras(silent: Mapping[str, object], *ranks: RankFact, user: int | None = None) -> Culprit:
    """Whom the incident names after RAS, asked in the ranks of ``user``, has called this process dead."""
    window = Window("n1", interval_s=1.0)
    window.begin(100.0, 1000.0)
    said = {"kind": "dead", "text": "rank 3 is dead", "communicator": "a1", "ranks": [silent]}
    told = Event("nccl_ras", 999.0, "rank 3 is dead", said, user)
    window.add("ranks", Reading(facts=ranks, events=(told,)))
    hang = Finding("smol", Severity.CRITICAL, "", Culprit("unknown"), 0.3, (), data={"run": "smol"})
    return collective_hang.RUNBOOK.diagnose(hang, window).culprit
