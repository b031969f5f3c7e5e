"""How many incidents the runs of one user may have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.incident_manager import MAX_OF_OTHERS, MAX_OF_USER, OTHERS, REST_S, Quota
from opsd.agent.judge import Judge
from opsd.agent.logs import Log
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Culprit, Finding, Severity

USERS = {"mine": 1000, "other": 1001, "of root": 0}


def finding(kind: str, run: str, key: int) -> Finding:
    """One of a run, or of a GPU."""
    return Finding(f"{run}/{key}", Severity.WARNING, "", Culprit("node", "n1"), 1.0, (), run=run, kind=kind)


def names(findings: list[Finding]) -> set[tuple[str, str]]:
    """Kinds and keys, as incidents have them."""
    return {(found.kind, found.key) for found in findings}


def test_a_user_without_end_has_so_many_incidents_and_others_have_all() -> None:
    """What is about hardware is not limited, and an incident there is stays; another may open a while after its end."""
    quota, told = Quota(), {"loss_nan"}
    mine = [finding("loss_nan", "mine", key) for key in range(3 * MAX_OF_USER)]
    others = [finding("loss_nan", "other", 1), *(finding("gpu_xid", "mine", key) for key in range(200))]
    current = names(quota.admit([*mine, *others], told, (), USERS, 0.0))
    assert len(current) == MAX_OF_USER + len(others)
    assert quota.exceeded == {1000}
    again = names(quota.admit([*reversed(mine), *others], told, current, USERS, 0.0))
    assert again == current
    current.remove(("loss_nan", "mine/3"))
    assert not quota.admit(mine[MAX_OF_USER:], told, current, USERS, REST_S - 1)
    after = names(quota.admit(mine[MAX_OF_USER:], told, current, USERS, 2 * REST_S - 2))
    assert len(after) == 1
    assert not names(quota.admit([], told, after, USERS, 2 * REST_S)) and not quota.exceeded


def test_incidents_of_runs_that_are_gone_count_on() -> None:
    """Else a user could open as many again with runs of other names."""
    quota, told = Quota(), {"loss_nan"}
    current = names(quota.admit([finding("loss_nan", "mine", key) for key in range(MAX_OF_USER)], told, (), USERS, 0.0))
    assert quota.admit([finding("loss_nan", "next", 1)], told, current, {"next": 1000}, 1.0) == []
    assert quota.exceeded == {1000}


def test_an_event_of_a_run_that_is_gone_still_counts_for_its_user() -> None:
    """The run was removed at once; what it said remains in the window, and is found again in each tick."""
    quota, told = Quota(), {"loss_nan"}
    found = [finding("loss_nan", "mine", key) for key in range(3 * MAX_OF_USER)]
    current = names(quota.admit(found, told, (), USERS, 0.0))
    assert names(quota.admit(found, told, current, {}, 1.0)) == current
    assert quota.exceeded == {1000}


def test_user_ids_without_number_have_no_more_together() -> None:
    """Each of a user namespace has a run; a user whose rank is on a GPU, or was minutes ago, has its own incidents."""
    quota, told = Quota(), {"loss_nan"}
    users = {f"id-{number}": 100_000 + number for number in range(100)} | USERS
    quota.admit([], told, (), users, 0.0, working={1000})
    found = [finding("loss_nan", f"id-{number}", key) for number in range(100) for key in range(MAX_OF_USER)]
    current = names(quota.admit(found, told, (), users, 1.0))
    assert len(current) == MAX_OF_OTHERS
    assert quota.exceeded == {OTHERS}
    mine, other = finding("loss_nan", "mine", 1), finding("loss_nan", "other", 1)
    assert quota.admit([mine, other], told, current, users, REST_S - 1) == [mine]


def test_runs_of_which_nobody_was_seen_share_a_quota() -> None:
    """Made and removed between two looks."""
    quota, told = Quota(), {"loss_nan"}
    found = [finding("loss_nan", f"gone-{key}", key) for key in range(3 * MAX_OF_USER)]
    assert len(quota.admit(found, told, (), {}, 0.0)) == MAX_OF_USER
    assert quota.exceeded == {None}


def test_runs_that_last_for_seconds_open_no_more_incidents() -> None:
    """Each ends its incidents and is followed by another."""
    quota, told, opened = Quota(), {"loss_nan"}, set[tuple[str, str]]()
    for second in range(int(REST_S)):
        found = [finding("loss_nan", "mine", 10 * second + key) for key in range(10)]
        opened |= names(quota.admit(found, told, (), USERS, float(second)))
    assert len(opened) == MAX_OF_USER


def test_a_node_that_slurm_cannot_reach_is_nobodys() -> None:
    """That a run has lost nodes is what its launcher says; the same incident by Slurm's word names no run."""
    told = Judge(RUNBOOKS, Log(lambda _: None)).told_by_users
    lost = [finding("node_unreachable", "mine", key) for key in range(2 * MAX_OF_USER)]
    silent = Finding("node1", Severity.CRITICAL, "", Culprit("node"), 1.0, (), kind="node_unreachable")
    admitted = Quota().admit([*lost, silent], told, (), USERS, 0.0)
    assert len(admitted) == MAX_OF_USER + 1
    assert silent in admitted


@given(st.lists(st.lists(st.tuples(st.sampled_from(sorted(USERS)), st.integers(0, 200)), max_size=150), max_size=6))
def test_nobody_ever_has_more(ticks: list[list[tuple[str, int]]]) -> None:
    """Whatever is found when; nothing that is an incident is ever left out."""
    quota, current = Quota(), set[tuple[str, str]]()
    for tick in ticks:
        found = [finding("loss_nan", run, key) for run, key in tick]
        admitted = names(quota.admit(found, {"loss_nan"}, current, USERS, 0.0))
        assert current & names(found) <= admitted
        current |= admitted
        for run in USERS:
            assert sum(key.startswith(f"{run}/") for _, key in current) <= MAX_OF_USER
