"""The search for the bad node: on simulated clusters with planted faults, and on arbitrary answers."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.preflight.finder import Answer, Culprit, Diagnosis, GroupTest, Tolerance, disjoint, find, partition
from tests.fakes.planted import PLANTS, Fault, SimulatedCluster, cluster, score, search

SIZES = st.integers(2, 200)
PROMISED = [plant for plant in PLANTS if plant != "flaky in 30 % of the tests"]


def diagnose(switch_of: dict[str, str], *faults: Fault, topology: bool = True) -> Diagnosis:
    simulated = SimulatedCluster([*switch_of], switch_of, faults, Random(7))
    return search(simulated, topology=topology)


def named(diagnosis: Diagnosis) -> set[str]:
    return {str(culprit) for culprit in diagnosis.culprits}


def node(name: str, **how: float) -> Fault:
    return Fault(Culprit("node", (name,)), **how)


@given(SIZES, st.integers(1, 40))
def test_groups_hold_every_node_once_and_nobody_is_alone(count: int, per_switch: int):
    """No remainder is left untested, whatever the number of nodes and the size of switches."""
    switch_of = cluster(count, per_switch)
    for topology in (switch_of, {}):
        groups = partition([*switch_of], topology)
        assert sorted(n for group in groups for n in group) == sorted(switch_of)
        assert min(map(len, groups)) >= 2


def test_groups_follow_the_switches():
    """232 nodes, 16 to a switch: every group is one switch, the last one half full."""
    switch_of = cluster(232, 16)
    groups = partition([*switch_of], switch_of)
    assert len(groups) == 15
    assert all(len({switch_of[n] for n in group}) == 1 for group in groups)


@given(st.lists(st.frozensets(st.sampled_from("abcdefgh"), min_size=2, max_size=3), max_size=12))
def test_tests_of_one_round_share_no_node(groups: list[frozenset[str]]):
    """Nobody has to be in two places, and every test is in exactly one round."""
    tests = [GroupTest(tuple(sorted(group)), "") for group in groups]
    rounds = disjoint(tests)
    assert sorted(index for indexes in rounds for index in indexes) == [*range(len(tests))]
    for indexes in rounds:
        members = [member for index in indexes for member in tests[index].members]
        assert len(members) == len({*members})


@given(st.integers(4, 120), st.integers(2, 40), st.data())
@settings(max_examples=60)
def test_one_bad_node_is_named_and_nobody_else(count: int, per_switch: int, data: st.DataObject):
    """Slow or dead, in a cluster of any size, with the topology or without."""
    switch_of = cluster(count, per_switch)
    bad = data.draw(st.sampled_from([*switch_of]))
    factor = data.draw(st.sampled_from([0.0, 0.5, 0.7]))
    diagnosis = diagnose(switch_of, node(bad, factor=factor), topology=data.draw(st.booleans()))
    assert named(diagnosis) == {f"node {bad}"}
    assert diagnosis.suspected == ()


GOOD, SCATTERED, SLOW, DEAD = (1.4e9,) * 10, (1.42e9,) * 8 + (0.9e9,) * 2, (0.4e9,) * 10, ()


@pytest.mark.parametrize(
    ("answers", "floor", "fails", "suspected"),
    [
        ((GOOD, SCATTERED), 0.0, False, ()),
        ((SCATTERED, SLOW), 0.0, False, ()),
        ((DEAD, GOOD, GOOD), 0.0, False, ("n1", "n2")),
        ((GOOD, DEAD, DEAD), 0.0, True, ()),
        ((SLOW, SLOW), 1e9, True, ()),
    ],
)
def test_the_only_pair_has_no_other_to_compare_with(
    answers: tuple[tuple[float, ...], ...], floor: float, fails: bool, suspected: tuple[str, ...]
) -> None:
    """On a busy machine one test of it says little. It fails if it does not end twice, or stays below the floor."""
    finder, given_answers = find(["n1", "n2"], tolerance=Tolerance(floor=floor)), iter(answers)
    next(finder)
    with pytest.raises(StopIteration) as end:
        while True:
            finder.send([Answer(next(given_answers))])
    diagnosis: Diagnosis = end.value.value
    assert (bool(diagnosis.culprits), diagnosis.suspected) == (fails, suspected)
    assert next(given_answers, None) is None


@given(st.integers(2, 150), st.integers(1, 40))
@settings(max_examples=40)
def test_a_healthy_cluster_is_called_healthy_and_every_node_was_tested(count: int, per_switch: int):
    """Two kinds of tests are enough: the groups, and all together."""
    switch_of = cluster(count, per_switch)
    diagnosis = diagnose(switch_of)
    assert diagnosis.clean
    assert {member for entry in diagnosis.evidence for member in entry.members} == {*switch_of}
    assert {entry.purpose for entry in diagnosis.evidence} == ({"screen", "all"} if count > 2 else {"pair"})


@given(st.integers(2, 60), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_whatever_the_answers_the_search_ends(count: int, random: Random):
    """Tests that fail at random, or never finish, neither loop for ever nor raise."""
    finder = find([f"n{i}" for i in range(count)])
    tests = next(finder)
    for _ in range(40 * count + 400):
        try:
            tests = finder.send([Answer((random.random(),) * random.randrange(3)) for _ in tests])
        except StopIteration as end:
            assert end.value.tests == len(end.value.evidence)
            return
    pytest.fail("the search did not end")


@pytest.mark.parametrize("topology", [True, False])
def test_a_suspect_is_confirmed_with_two_different_partners(topology: bool):
    """One from its own switch, where that is known, and one from a group that passed."""
    diagnosis = diagnose(cluster(64, 8), node("node-0009"), topology=topology)
    partners = {
        next(m for m in entry.members if m != "node-0009")
        for entry in diagnosis.evidence
        if entry.purpose == "confirm" and "node-0009" in entry.members
    }
    own = {f"node-{i:04}" for i in range(8, 16)}
    assert len(partners) == 2
    assert len(partners & own) == (1 if topology else 0)


def test_a_link_is_named_as_a_link_and_not_as_its_ends():
    """Within one group, where both halves pass, and between groups, where all groups pass."""
    for one, two in (("node-0008", "node-0013"), ("node-0003", "node-0060")):
        diagnosis = diagnose(cluster(64, 8), Fault(Culprit("link", (one, two))))
        assert named(diagnosis) == {f"the link between {one} and {two}"}


def test_a_path_between_two_switches_is_told_from_a_link():
    """Other nodes of the same two switches are slow with each other, too."""
    diagnosis = diagnose(cluster(64, 8), Fault(Culprit("path", ("leaf-001", "leaf-006"))))
    assert named(diagnosis) == {"the path between switch leaf-001 and switch leaf-006"}


def test_a_switch_is_named_instead_of_its_nodes():
    """All through it, or only what leaves it; without the topology the nodes that share something are named."""
    for kind, text in (("switch", "switch leaf-003"), ("uplink", "the uplink of switch leaf-003")):
        assert named(diagnose(cluster(64, 8), Fault(Culprit(kind, ("leaf-003",))))) == {text}
    (shared,) = diagnose(cluster(64, 8), Fault(Culprit("switch", ("leaf-003",))), topology=False).culprits
    assert shared.kind == "group"
    assert shared.parts == tuple(f"node-{i:04}" for i in range(24, 32))


def test_two_bad_nodes_of_one_switch_do_not_make_a_bad_switch():
    """One node out of every quarter is asked before a switch is blamed."""
    assert named(diagnose(cluster(64, 8), node("node-0024"), node("node-0030", factor=0.0))) == {
        "node node-0024",
        "node node-0030",
    }


def test_a_cluster_in_which_nothing_works_is_not_blamed_on_somebody():
    """Every pair fails: the fabric, the rendezvous or the whole idea is broken."""
    switch_of = cluster(8, 4)
    diagnosis = diagnose(switch_of, *(node(name, factor=0.0) for name in switch_of))
    assert [culprit.kind for culprit in diagnosis.culprits] == ["everything"]


def test_an_absolute_floor_fails_a_cluster_that_is_evenly_slow():
    """Relative thresholds cannot see that."""
    switch_of = cluster(16, 4)
    finder = find([*switch_of], switch_of, Tolerance(floor=40.0))
    tests = next(finder)
    with pytest.raises(StopIteration) as end:
        while True:
            tests = finder.send([Answer((30.0,) * 8) for _ in tests])
    assert [culprit.kind for culprit in end.value.value.culprits] == ["everything"]


def test_a_fault_that_does_not_show_again_is_told_as_such():
    """One test fails, once: nobody is blamed, the group is suspected, and the cluster is not called clean."""
    switch_of = cluster(16, 4)
    finder = find([*switch_of], switch_of)
    tests, first = next(finder), True
    with pytest.raises(StopIteration) as end:
        while True:
            answers = [Answer((100.0,) * 8) for _ in tests]
            if first:
                answers[1], first = Answer(()), False
            tests = finder.send(answers)
    diagnosis = end.value.value
    assert diagnosis.culprits == ()
    assert diagnosis.suspected == tuple(f"node-{i:04}" for i in range(4, 8))
    assert not diagnosis.clean


@pytest.mark.parametrize("nodes", [[], ["a"], ["a", "b", "a"]])
def test_what_cannot_be_searched_is_refused(nodes: list[str]):
    """Fewer than two nodes, or one named twice."""
    with pytest.raises(ValueError, match="two nodes"):
        next(find(nodes))


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_switch", "budget"), [(232, 16, 60), (1024, 32, 120)])
@pytest.mark.parametrize("plant", PROMISED)
def test_the_right_culprit_within_the_budget(plant: str, nodes: int, per_switch: int, budget: int):
    """At least 99 % of 200 seeded trials name exactly what was planted, none uses more tests than promised."""
    right, most_tests = score(plant, nodes, per_switch, trials=200, seed=11)
    assert right >= 198
    assert most_tests <= budget
