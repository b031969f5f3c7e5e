"""Draining and returning nodes by the rules: the cap, the cool-down, the preflight, relapses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.settings.policy import PolicySettings
from opsd.slurm import node_comment, ownership
from opsd.slurm.drain import NotOurs
from opsd.slurm.node_comment import NodeHistory, Stay
from opsd.slurm.ownership import DAY_S, PreflightResult, Refused
from opsd.slurm.port import Node, SlurmUnavailable
from tests.fakes.slurm import FakeSlurm, cluster, held

NOW = 1_763_700_000.0
RULES = PolicySettings(max_drained_share=0.1, min_drained=1)
DOWN = SlurmUnavailable("scontrol has not answered within 12 s")


def test_a_reason_tells_incident_kind_and_evidence_in_one_line() -> None:
    """And the kind can be read back from it."""
    told = ownership.reason("gpu_xid", "Xid 79\nagain", incident="gpu_xid-20261121-ab", evidence="/var/lib/opsd/e.json")
    assert told == "opsd:gpu_xid-20261121-ab gpu_xid: Xid 79 again; see /var/lib/opsd/e.json"
    assert ownership.kind_of(told) == "gpu_xid"
    assert ownership.kind_of("opsd: preflight quick failed: gpu_burn; see /x.json") == "preflight"
    assert [ownership.kind_of(told) for told in ("replace the fan", "opsd:", "opsd:manual")] == [
        "unknown",
        "unknown",
        "manual",
    ]


def test_a_drain_is_remembered_beyond_the_return() -> None:
    """The comment keeps what Slurm's reason forgets, and leaves other people's words alone."""
    slurm = cluster()
    slurm.by_comment["n01"] = "rack 12"
    assert ownership.drain(slurm, ["n01"], "opsd:manual ib_link", RULES, now=NOW) == ("n01",)
    passed = {"n01": PreflightResult(NOW + 50, passed=True)}
    assert ownership.give_back(slurm, ["n01"], passed, RULES, now=NOW + 60) == ("n01",)
    assert slurm.by_comment["n01"] == f"rack 12 [opsd1 ib_link={NOW:.0f}-{NOW + 60:.0f} tested={NOW + 50:.0f}]"


def test_a_drain_that_was_cut_off_is_recorded_by_its_repetition() -> None:
    """Slurm has drained the nodes, but was away when their history was to be written."""

    class Leaving(FakeSlurm):
        def set_comment(self, name: str, text: str) -> None:
            if name == "n02" and self.by_name["n02"].reason_at is None:
                raise DOWN
            super().set_comment(name, text)

    slurm, told = Leaving([Node(f"n{number:02d}", "idle") for number in range(30)]), "opsd:manual ib_link: flaps"
    with pytest.raises(SlurmUnavailable):
        ownership.drain(slurm, ["n01", "n02"], told, RULES, now=NOW)
    slurm.by_name["n02"] = replace(slurm.by_name["n02"], reason_at=NOW + 1)
    for later in (60, 120):
        assert ownership.drain(slurm, ["n01", "n02"], told, RULES, now=NOW + later) == ()
    assert slurm.by_comment == {"n01": f"[opsd1 ib_link={NOW:.0f}-]", "n02": f"[opsd1 ib_link={NOW + 1:.0f}-]"}
    assert ownership.drain(slurm, ["n01"], "opsd:manual gpu_xid", RULES, now=NOW + 180) == ()
    assert slurm.by_comment["n01"] == f"[opsd1 ib_link={NOW:.0f}-]"


@pytest.mark.parametrize(
    ("nodes", "may"), [(1, 1), (3, 1), (4, 1), (8, 2), (12, 3), (56, 3), (60, 3), (80, 4), (1250, 62)]
)
def test_how_many_nodes_may_be_held(nodes: int, may: int) -> None:
    """One in twenty; in small clusters three, but one in four at most, and one always."""
    assert ownership.allowance([Node(f"n{number}", "idle") for number in range(nodes)], PolicySettings()) == may


def test_the_cap_counts_all_that_are_asked_for() -> None:
    """Two of 21 nodes at 10 %: one is held, so of two more neither is taken."""
    slurm = cluster(held("x1"))
    with pytest.raises(Refused, match=r"opsd holds 1 of 21 nodes already \(x1\); 2 may be held at once"):
        ownership.drain(slurm, ["n01", "n02"], "opsd:manual x", RULES, now=NOW)
    assert slurm.updates == []
    assert ownership.drain(slurm, ["n01", "n02"], "opsd:manual x", RULES, force=True, now=NOW) == ("n01", "n02")


def test_a_node_rests_between_two_drains() -> None:
    """A node given back a minute ago is left in service; after the cool-down it may go."""
    slurm = cluster()
    slurm.by_comment["n01"] = f"[opsd1 ib_link={NOW - 900:.0f}-{NOW - 60:.0f}]"
    with pytest.raises(Refused, match="n01 was last taken out or given back by opsd at"):
        ownership.drain(slurm, ["n01"], "opsd:manual x", RULES, now=NOW)
    assert ownership.drain(slurm, ["n01"], "opsd:manual x", RULES, now=NOW + 3600) == ("n01",)


def test_what_a_wrong_clock_has_written_keeps_no_node_in_service() -> None:
    """Neither as a cool-down of a year, nor as a return that did not last."""
    slurm = cluster()
    year = 365 * DAY_S
    stays = [
        f"gpu_xid={NOW + year:.0f}-{NOW + year + 60:.0f}",
        f"gpu_xid={NOW + 2 * year:.0f}-{NOW + 2 * year + 60:.0f}",
    ]
    slurm.by_comment["n01"] = f"[opsd1 {' '.join(stays)}]"
    assert ownership.drain(slurm, ["n01"], "opsd:gpu_xid-1 gpu_xid: x", RULES, now=NOW) == ("n01",)
    history = node_comment.read(slurm.by_comment["n01"])
    assert not ownership.relapse_objection("n01", history, PolicySettings(max_returns=1))


@pytest.mark.parametrize("force", [False, True])
def test_other_peoples_nodes_are_theirs_even_by_force(force: bool) -> None:
    """Neither drained nor given back."""
    slurm = cluster(Node("x1", "idle", frozenset({"drain"}), "replace the fan", "alice"))
    with pytest.raises((Refused, NotOurs), match="by alice: replace the fan"):
        ownership.drain(slurm, ["x1"], "opsd:manual x", RULES, force=force, now=NOW)
    with pytest.raises((Refused, NotOurs), match="by alice: replace the fan"):
        ownership.give_back(slurm, ["x1"], {"x1": PreflightResult(NOW, True)}, RULES, force=force, now=NOW)
    assert slurm.updates == []


@pytest.mark.parametrize(
    ("checked", "why"),
    [
        (None, "has no result of preflight standard"),
        (PreflightResult(NOW - 200, passed=True), "is older than its drain"),
        (PreflightResult(NOW - 50, passed=False), "failed preflight standard"),
    ],
)
def test_a_node_is_given_back_once_it_is_proved(checked: PreflightResult | None, why: str) -> None:
    """The preflight must be of the right profile, newer than the drain, and passed."""
    slurm = cluster(held("x1"))
    proofs = {"x1": checked} if checked else {}
    with pytest.raises(Refused, match=f"{why}.*opsd preflight --profile standard"):
        ownership.give_back(slurm, ["x1"], proofs, RULES, now=NOW)
    assert slurm.updates == []
    assert ownership.give_back(slurm, ["x1"], {"x1": PreflightResult(NOW - 50, passed=True)}, RULES, now=NOW) == ("x1",)


def test_a_proof_does_not_last() -> None:
    """Days after the check nobody knows how the node is."""
    slurm = cluster(held("x1", NOW - 5 * DAY_S))
    with pytest.raises(Refused, match="too old"):
        ownership.give_back(slurm, ["x1"], {"x1": PreflightResult(NOW - 2 * DAY_S, passed=True)}, RULES, now=NOW)


def test_a_node_that_relapses_is_left_to_people() -> None:
    """Twice back and out again within days: the dates are told, and only force gives it back."""
    slurm = cluster(held("x1"))
    day = 86_400
    stays = [(f"ib_link={NOW - back * day - 50:.0f}-{NOW - back * day:.0f}") for back in (9, 4)]
    slurm.by_comment["x1"] = f"[opsd1 {' '.join(stays)} gpu_xid={NOW - 100:.0f}-]"
    passed = {"x1": PreflightResult(NOW - 50, passed=True)}
    with pytest.raises(Refused, match=r"x1 came back to service and failed again 2 times: back 2025-11-\d\d .*gpu_xid"):
        ownership.give_back(slurm, ["x1"], passed, RULES, now=NOW)
    history = node_comment.read(slurm.by_comment["x1"])
    assert not ownership.return_objection(
        slurm.by_name["x1"], history, passed["x1"], PolicySettings(relapse_days=3.0), NOW
    )
    assert ownership.give_back(slurm, ["x1"], passed, RULES, force=True, now=NOW) == ("x1",)


def test_maintenance_is_no_relapse() -> None:
    """Three new kernels within weeks keep no node out of service, nor do they make its first fault a third one."""
    slurm = cluster(held("x1"))
    stays = [(f"maintenance={NOW - back * DAY_S - 50:.0f}-{NOW - back * DAY_S:.0f}") for back in (12, 8, 4)]
    slurm.by_comment["x1"] = f"[opsd1 {' '.join(stays)} gpu_xid={NOW - 100:.0f}-]"
    passed = {"x1": PreflightResult(NOW - 50, passed=True)}
    assert ownership.give_back(slurm, ["x1"], passed, RULES, now=NOW) == ("x1",)
    fault = NodeHistory((Stay("gpu_xid", 1.0, 2.0), Stay("maintenance", 3.0, 4.0), Stay("gpu_xid", 5.0)))
    assert [again.out for _, again in fault.relapses(DAY_S)] == [5.0]


words = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)


stays = st.builds(Stay, words, st.integers(1, 10**9).map(float), st.one_of(st.none(), st.integers(1, 10**9).map(float)))


records = st.builds(
    NodeHistory,
    st.lists(stays, max_size=8).map(tuple),
    st.sampled_from(["ready", "unready"]),
    st.integers(1, 9).map(float),
)


@given(st.text(st.characters(codec="ascii", exclude_characters="[]"), max_size=40), records)
def test_a_record_survives_in_any_comment(comment: str, kept: NodeHistory) -> None:
    """What is written is read again, once, and the words of others stay."""
    text = node_comment.write(node_comment.write(comment, NodeHistory((Stay("old", 1.0),))), kept)
    assert node_comment.read(text) == kept
    assert text.startswith(comment.strip())
    assert node_comment.write(text, NodeHistory()) == comment.strip()


@given(st.text(max_size=60))
def test_any_comment_can_be_read(comment: str) -> None:
    """Written by any user."""
    assert isinstance(node_comment.read(f"{comment}[opsd1 {comment}]"), NodeHistory)
