"""How many incidents the runs of one user may have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.quota import MAX_OF_USER, Quota
from opsd.runbooks.base import Culprit, Finding, Severity

USERS = {"mine": 1000, "other": 1001, "of root": 0}


def finding(kind: str, run: str, key: int) -> Finding:
    """One of a run, or of a GPU."""
    return Finding(kind, f"{run}/{key}", Severity.WARNING, "", Culprit("node", "n1"), 1.0, (), run=run)


def names(findings: list[Finding]) -> set[tuple[str, str]]:
    """Kinds and keys, as incidents have them."""
    return {(found.kind, found.key) for found in findings}


def test_a_user_without_end_has_so_many_incidents_and_others_have_all() -> None:
    """What is about hardware is not limited, and an incident there is stays; another may open once one has ended."""
    quota, told = Quota(), {"loss_nan"}
    mine = [finding("loss_nan", "mine", key) for key in range(3 * MAX_OF_USER)]
    others = [finding("loss_nan", "other", 1), *(finding("gpu_xid", "mine", key) for key in range(200))]
    current = names(quota.admit([*mine, *others], told, (), USERS))
    assert len(current) == MAX_OF_USER + len(others)
    assert quota.exceeded == {1000}
    again = names(quota.admit([*reversed(mine), *others], told, current, USERS))
    assert again == current
    current.remove(("loss_nan", "mine/3"))
    after = names(quota.admit(mine[MAX_OF_USER:], told, current, USERS))
    assert len(after) == 1
    assert not names(quota.admit([], told, after, USERS)) and not quota.exceeded


def test_incidents_of_runs_that_are_gone_count_on() -> None:
    """Else a user could open as many again with runs of other names."""
    quota, told = Quota(), {"loss_nan"}
    current = names(quota.admit([finding("loss_nan", "mine", key) for key in range(MAX_OF_USER)], told, (), USERS))
    assert quota.admit([finding("loss_nan", "next", 1)], told, current, {"next": 1000}) == []
    assert quota.exceeded == {1000}


@given(st.lists(st.lists(st.tuples(st.sampled_from(sorted(USERS)), st.integers(0, 200)), max_size=150), max_size=6))
def test_nobody_ever_has_more(ticks: list[list[tuple[str, int]]]) -> None:
    """Whatever is found when; nothing that is an incident is ever left out."""
    quota, current = Quota(), set[tuple[str, str]]()
    for tick in ticks:
        found = [finding("loss_nan", run, key) for run, key in tick]
        admitted = names(quota.admit(found, {"loss_nan"}, current, USERS))
        assert current & names(found) <= admitted
        current |= admitted
        for run in USERS:
            assert sum(key.startswith(f"{run}/") for _, key in current) <= MAX_OF_USER
