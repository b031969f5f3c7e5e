"""Which nodes are near each other by the switch tree, and which to pick for a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.slurm.topology import Choice, Topology, TopologyError, parse, pick, read

TREE = parse("""
SwitchName=leaf1 Nodes=n[1-4]
SwitchName=leaf2 Nodes=n[5-8]  # full
SwitchName=leaf3 LinkSpeed=400 Nodes=n[9-12]
SwitchName=leaf4 Nodes=n[13-14]
switchname=spine1 switches=leaf[1-2]
SwitchName=spine2 Switches=leaf[3-4]
SwitchName=core Switches=spine[1-2]
""")


def all_equal(*numbers: int) -> dict[str, float]:
    return {f"n{number}": 0.0 for number in numbers}


@pytest.mark.parametrize(
    ("one", "other", "hops"), [("n1", "n4", 1), ("n1", "n5", 3), ("n1", "n13", 5), ("n1", "x", None)]
)
def test_hops_are_the_switches_on_the_way(one: str, other: str, hops: int | None) -> None:
    """The same leaf, the same spine, the core, and no known way; the same in both directions."""
    assert TREE.hops(one, other) == TREE.hops(other, one) == hops


def test_a_tree_that_is_a_ring_ends() -> None:
    """A wrong file is no reason to hang."""
    ring = parse("SwitchName=a Nodes=n1 Switches=b\nSwitchName=b Nodes=n2 Switches=a")
    assert ring.hops("n1", "n2") is not None


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


def test_what_a_swap_costs_is_told_in_hops() -> None:
    """Nothing is said where a way is not known."""
    run = ["n1", "n2", "n3", "n4"]
    assert TREE.swap_text(run, "n1", "n5") == "n5 is 3.0 hops from the others, n1 was 1.0"
    assert TREE.swap_text(["n1", "n5"], "n1", "n2") == "n2 is as near to the others as n1: 3.0 hops"
    assert TREE.swap_text(run, "n1", "x") == ""


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Only if it was named: most clusters have none."""
    with pytest.raises(TopologyError, match="cannot be read"):
        read(tmp_path / "topology.conf")
    with pytest.raises(TopologyError, match="cannot be read: hostlist"):
        parse("SwitchName=a Nodes=n[3-1]")


def test_a_file_with_other_bytes_than_text_is_read(tmp_path: Path) -> None:
    """A comment in Latin-1."""
    (tmp_path / "topology.conf").write_bytes(b"SwitchName=a Nodes=n[1-2] # B\xfcro\n")
    assert read(tmp_path / "topology.conf").leaf == {"n1": "a", "n2": "a"}
