"""Which nodes to pick for a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from opsd.slurm.pick import Choice, for_runs, pick, pick_in_one
from opsd.slurm.port import Partition
from opsd.slurm.topology import Topology, even, parse
from tests.fakes.fabric import BLOCKS, TREE, all_equal


def test_the_fewest_switches_are_used() -> None:
    """A leaf that has them all, the one that they fill; else the lowest switch above enough nodes."""
    assert pick(all_equal(*range(1, 15)), 2, TREE) == Choice(("n13", "n14"), "leaf4")
    assert pick(all_equal(*range(1, 15)), 4, TREE) == Choice(("n1", "n2", "n3", "n4"), "leaf1")
    assert pick(all_equal(1, 2, 3, 5, 6, 9), 4, TREE) == Choice(("n1", "n2", "n3", "n5"), "spine1")
    assert pick(all_equal(1, 9), 2, TREE) == Choice(("n1", "n9"), "core")


def test_a_good_node_far_away_comes_before_a_bad_one_near() -> None:
    """Badness first, then hops; bad ones only where there are no others."""
    free = {**all_equal(1, 2, 9, 10), "n3": 8.0}
    assert pick(free, 3, TREE) == Choice(("n1", "n10", "n2"), "core")
    assert pick(free, 5, TREE) == Choice(("n1", "n10", "n2", "n3", "n9"), "core")
    assert pick({"n1": 0.0, "n2": 8.0, "n3": 1.0}, 2, TREE) == Choice(("n1", "n3"), "leaf1")


def test_without_a_topology_any_good_nodes_do() -> None:
    """Also where some nodes are in none, and where there are too few."""
    assert pick({"a": 1.0, "b": 0.0, "c": 0.0}, 2, Topology()) == Choice(("b", "c"), "")
    assert pick({"n1": 0.0, "x": 0.0}, 2, TREE) == Choice(("n1", "x"), "")
    assert pick({"n1": 0.0}, 2, TREE) is None


def test_a_pick_keeps_to_as_few_blocks_as_possible() -> None:
    """One rack if it has enough, otherwise the one that is fullest first."""
    rack = tuple(f"c{k:02}" for k in range(1, 17))
    assert pick(dict.fromkeys(BLOCKS.leaf, 0.0), 16, BLOCKS) == Choice(rack, "rack1", "rack1")
    some = pick(dict.fromkeys(BLOCKS.leaf, 0.0), 20, BLOCKS)
    assert some is not None
    assert sorted(BLOCKS.leaf[node] for node in some.nodes).count("rack1") == 18


def test_a_pick_keeps_to_a_domain_that_the_drivers_tell() -> None:
    """Before a leaf, and where no switch is known; badness counts first, and whole domains stay free."""
    told = {"n1": "x.1", "n5": "x.1", "n2": "x.2", "n3": "x.2", "n6": "x.2"}
    tree = TREE.with_domains(told)
    assert pick(all_equal(1, 2, 3, 4, 5), 2, TREE) == Choice(("n1", "n2"), "leaf1")
    assert pick(all_equal(1, 2, 4, 5), 2, tree) == Choice(("n1", "n5"), "spine1", "x.1")
    assert pick({**all_equal(1, 4), "n5": 2.0}, 2, tree) == Choice(("n1", "n4"), "leaf1")
    bare = Topology().with_domains(told)
    assert pick(all_equal(1, 2, 3, 5, 6), 3, bare) == Choice(("n2", "n3", "n6"), "", "x.2")
    assert pick(all_equal(1, 2, 3, 5, 6, 7), 4, bare) == Choice(("n2", "n3", "n6", "n7"), "")


def test_blocks_of_one_aggregate_are_nearer() -> None:
    """By BlockSizes, or as scontrol shows them, at every level; they stay blocks, which are in no tree of switches."""
    shown = (
        "BlockName=b0 Nodes=n[1-2]\nBlockName=b1 Nodes=n[3-4]\nBlockName=b2 Nodes=n[5-6]\nBlockName=b3 Nodes=n[7-8]\n"
    )
    told = (
        "AggregatedBlock=b[0-1] Nodes=n[1-4]\nAggregatedBlock=b[2-3] Nodes=n[5-8]\nAggregatedBlock=b[0-3] Nodes=n[1-8]"
    )
    for tree in (parse(shown + "BlockSizes=2,4,8"), parse(shown + told)):
        assert [tree.hops("n1", other) for other in ("n2", "n3", "n5")] == [1, 3, 5]
        assert pick(all_equal(1, 2, 5, 6, 7), 3, tree) == Choice(("n5", "n6", "n7"), "b[2-3]")
    assert parse(shown + "BlockSizes=2").hops("n1", "n3") is None
    assert parse(shown + f"BlockSizes=0,x,{'9' * 200}").hops("n1", "n3") is None
    plain = parse(shown).with_domains({"n1": "x.1", "n2": "x.1"})
    assert pick(all_equal(1, 3), 2, plain) == Choice(("n1", "n3"), "")


def test_a_pick_keeps_to_switches_that_are_connected() -> None:
    """Also for worse nodes, as Slurm starts no job across; nodes without a known switch may be anywhere."""
    trees = parse("SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n[4-5]")
    assert pick({**all_equal(1, 2, 4), "n3": 8.0}, 3, trees) == Choice(("n1", "n2", "n3"), "a")
    assert pick(all_equal(1, 2, 4, 5), 3, trees) is None
    assert pick({**all_equal(1, 2, 4, 5), "x": 0.0}, 3, trees) == Choice(("n1", "n2", "x"), "")


def test_a_bad_way_is_avoided_if_it_can_be() -> None:
    """Before all that speaks against nodes; one that cannot be avoided is named, and no second one is accepted."""
    tree = replace(even([f"n{number}" for number in range(1, 9)], 2), bad={("leaf-000", "leaf-001"): "yesterday"})
    assert pick(all_equal(1, 3, 5), 2, tree) == Choice(("n1", "n5"), "spine")
    assert pick({**all_equal(1, 3), "n5": 8.0}, 2, tree) == Choice(("n1", "n5"), "spine")
    assert pick(all_equal(1, 2, 3), 2, tree) == Choice(("n1", "n2"), "leaf-000")
    whole = pick(all_equal(1, 3, 5), 3, tree)
    assert whole is not None
    assert whole.bad_ways == (("leaf-000", "leaf-001"),)
    worse = replace(tree, bad={**tree.bad, ("leaf-002", "leaf-003"): "", ("leaf-000", "leaf-003"): ""})
    three = pick(all_equal(*range(1, 9)), 5, worse)
    assert three is not None
    assert (len(three.nodes), len(three.bad_ways)) == (5, 1)
    trees = parse("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=s Switches=a,b\nSwitchName=c Nodes=n[3-4]")
    assert pick(all_equal(1, 2, 3, 4), 2, replace(trees, bad={("a", "b"): ""})) == Choice(("n3", "n4"), "c")
    two = [Partition("p", ("n1", "n3"), 1, ""), Partition("q", ("n1", "n5"), 1, "")]
    choice = pick_in_one(two, {**all_equal(1, 3), "n5": 1.0}, 2, tree)
    assert choice is not None
    assert (choice.partition, choice.bad_ways) == ("q", ())


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))), st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_a_pick_has_a_bad_way_only_where_no_choice_is_without(ways, count, taken) -> None:
    """Whatever is measured as bad, as many nodes are found as without it, and none is bad if that is possible."""
    tree = even([f"n{number:02}" for number in range(12)], 2)
    tree = replace(tree, bad={(f"leaf-{a:03}", f"leaf-{b:03}"): "" for a, b in ways if a < b})
    free = {name: 0.0 for number, name in enumerate(tree.leaf) if number not in taken}
    choice = pick(free, count, tree)
    assert (choice is None) == (count > len(free))
    on_leaf = Counter(tree.leaf[name] for name in free)
    possible = any(
        not any({*pair} <= {*leaves} for pair in tree.bad) and sum(on_leaf[leaf] for leaf in leaves) >= count
        for size in range(1, 7)
        for leaves in combinations(sorted(on_leaf), size)
    )
    assert choice is None or (not choice.bad_ways) == possible


def test_the_partition_of_the_idle_checks_is_for_no_run() -> None:
    """It has all nodes, and its jobs give way to all others; one that is alone, or asked for, is taken."""
    checks = Partition("checks", ("n1", "n2", "n3", "n5"), 0, "REQUEUE")
    train, down = (Partition(name, ("n1", "n2"), 1, "OFF", state=state) for name, state in (("a", "up"), ("b", "down")))
    assert for_runs([checks, train, down]) == [train]
    assert for_runs([checks, down]) == [checks]


def test_nodes_of_one_partition_are_picked() -> None:
    """Those of the least badness, wherever; a job has one partition."""
    halves = [Partition("a", ("n1", "n2"), 1, "OFF"), Partition("b", ("n3", "n5"), 1, "OFF")]
    assert pick_in_one(halves, all_equal(1, 2, 3, 5), 3, TREE) is None
    near = pick_in_one(halves[::-1], all_equal(1, 2, 3, 5), 2, TREE)
    assert near == Choice(("n1", "n2"), "leaf1", partition="a")
    better = pick_in_one(halves, {"n1": 0.0, "n2": 4.0, "n3": 1.0, "n5": 1.0}, 2, TREE)
    assert better is not None and better.partition == "b"
