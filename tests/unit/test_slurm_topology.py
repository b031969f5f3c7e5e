"""Which nodes are near each other by the switch tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.slurm.port import SlurmUnavailable
from opsd.slurm.runner import Output, Runner
from opsd.slurm.topology import Topology, TopologyError, even, parse
from opsd.slurm.topology_source import read
from tests.fakes.fabric import BLOCKS, TREE


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


def test_a_line_goes_on_after_a_backslash() -> None:
    """Slurm reads its files so; the nodes on the second line were on no switch."""
    tree = parse("SwitchName=a \\\n  Nodes=n[1-2]\nSwitchName=b Nodes=n3\n")
    assert tree.leaf == {"n1": "a", "n2": "a", "n3": "b"}


def test_what_a_swap_costs_is_told_in_hops() -> None:
    """Nothing is said where a way is not known."""
    run = ["n1", "n2", "n3", "n4"]
    assert TREE.swap_text(run, "n1", "n5") == "n5 is 3.0 hops from the others, n1 was 1.0"
    assert TREE.swap_text(["n1", "n5"], "n1", "n2") == "n2 is as near to the others as n1: 3.0 hops"
    assert TREE.swap_text(run, "n1", "x") == ""
    bad = replace(TREE, bad={("leaf1", "leaf2"): "1.2 GB/s, yesterday", ("leaf2", "leaf3"): "yesterday"})
    said = "the way between leaf1 and leaf2 was bad when last measured (1.2 GB/s, yesterday)"
    assert bad.swap_text(run, "n1", "n5").endswith(f"n1 was 1.0, {said}")
    assert "bad" not in bad.swap_text(run, "n1", "n9")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Only if it was named: most clusters have none."""
    with pytest.raises(TopologyError, match="cannot be read"):
        read(tmp_path / "topology.conf")
    with pytest.raises(TopologyError, match="cannot be read: hostlist"):
        parse("SwitchName=a Nodes=n[3-1]")
    (tmp_path / "topology.conf").write_text("SwitchName=a Nodes=n[3-1]")
    with pytest.raises(TopologyError, match=r"topology.conf: the topology cannot be read: hostlist"):
        read(tmp_path / "topology.conf")


@pytest.mark.parametrize(
    "content", ["", '[1] "H-1"[1](1) # "n1 mlx5_0" lid 2 4xNDR\n', "SwitchName=top Switches=a,b\n"]
)
def test_a_file_without_a_node_is_no_topology(tmp_path: Path, content: str) -> None:
    """An empty one, as a failed command leaves it, or what ibnetdiscover prints; it was taken for none at all."""
    (tmp_path / "topology.conf").write_text(content)
    with pytest.raises(TopologyError, match=r"topology.conf has no nodes below a switch or in a block"):
        read(tmp_path / "topology.conf")
    with pytest.raises(TopologyError, match="has no nodes"):
        read(environ={"SLURM_CONF": str(tmp_path / "slurm" / "slurm.conf")}, measured=tmp_path / "topology.conf")


def test_a_file_with_other_bytes_than_text_is_read(tmp_path: Path) -> None:
    """A comment in Latin-1."""
    (tmp_path / "topology.conf").write_bytes(b"SwitchName=a Nodes=n[1-2] # B\xfcro\n")
    assert read(tmp_path / "topology.conf").leaf == {"n1": "a", "n2": "a"}


SHOWN = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[5-8]
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]
SwitchName=spine2 Level=1 LinkSpeed=1 Nodes=n[5-8] Switches=leaf3
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-8] Switches=spine[1-2]
"""


"""``scontrol show topology`` of 22.05.8."""


RACKS = """\
# Number of Nodes in block1: 3
# ClusterUUID and CliqueID: 5e797fc6-0f46-421a-8724-0e102c0f723c
BlockName=block_5e797fc6-0f46-421a-8724-0e102c0f723c_1234 Nodes=hpc-9,hpc-13,hpc-17
# Number of Nodes in block2: 3
BlockName=block_5e797fc6-0f46-421a-8724-0e102c0f721e_23456 Nodes=hpc-22,hpc-26,hpc-30
BlockSizes=1
"""


"""As azslurm writes it for racks of GB200 (Azure/cyclecloud-slurm), with fewer nodes."""


ISLANDS = """\
# switch.3.1=hpcislandid-1
SwitchName=switch.3.1 Switches=switch.2.[1-2]
# switch.2.1=network-block-1
SwitchName=switch.2.1 Switches=switch.1.1
SwitchName=switch.2.2 Switches=switch.1.2
SwitchName=switch.1.1 Nodes=node-1
SwitchName=switch.1.2 Nodes=node-2
"""


"""As NVIDIA/topograph writes the network of a cloud: upper switches first."""


def test_what_the_controller_shows_is_the_same_tree() -> None:
    """It names all nodes below a switch at each level; only those of level 0 hang from it."""
    told = parse(SHOWN)
    assert (told.leaf["n4"], told.leaf["n8"]) == ("leaf2", "leaf3")
    assert [told.hops("n1", other) for other in ("n2", "n3", "n5")] == [1, 3, 5]
    assert told.domain == {}


def test_trees_and_blocks_of_other_programs_are_read() -> None:
    """Names with dots and UUIDs; a block is an NVLink domain, and nothing is known of the ways between blocks."""
    assert parse(ISLANDS).hops("node-1", "node-2") == 5
    racks = parse(RACKS)
    assert racks.place("hpc-13") == "block_5e797fc6-0f46-421a-8724-0e102c0f723c_1234"
    assert (racks.hops("hpc-9", "hpc-17"), racks.hops("hpc-9", "hpc-22")) == (1, None)
    both = parse("BlockName=rack1 Nodes=c[1-2]\nSwitchName=s1 Nodes=c[1-2],x1\n")
    assert (both.place("c1"), both.leaf["c1"], both.place("x1"), both.hops("c1", "x1")) == ("rack1", "s1", None, 1)


def test_groups_of_nodes_are_kept_in_one_domain() -> None:
    """Whole groups first, what is left over of each rack last; groups that span racks are named."""
    order = BLOCKS.arranged(sorted(BLOCKS.leaf), 16)
    assert order[-4:] == ["c17", "c18", "c35", "c36"]
    assert BLOCKS.split_groups(order[:32], 16) == []
    (split,) = BLOCKS.split_groups(sorted(BLOCKS.leaf)[:32], 16)
    assert (split[0], split[-1]) == ("c17", "c32")
    assert BLOCKS.split_groups(["c01", "x", "y"], 3) == []
    assert BLOCKS.split_groups(["c01", "c19"], 1) == []


def test_a_swap_out_of_the_domain_is_told() -> None:
    """Also where the hops are not known."""
    told = BLOCKS.swap_text(["c01", "c02"], "c01", "c19")
    assert told == "c19 is 3.0 hops from the others, c01 was 1.0, c19 is not in the NVLink domain rack1"
    trees = parse("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n3\n")
    assert trees.swap_text(["n1", "n2"], "n1", "n3") == "n3 is below b, which is not connected with the others"
    assert trees.swap_text(["n1", "n2"], "n1", "n9") == ""
    apart = parse("BlockName=rack1 Nodes=c[01-02]\nBlockName=rack2 Nodes=c03")
    assert apart.swap_text(["c01", "c02"], "c01", "c03") == "c03 is not in the NVLink domain rack1"
    assert BLOCKS.swap_text(["c01", "c02"], "c01", "c03") == "c03 is as near to the others as c01: 1.0 hops"
    assert min(("c19", "c05", "x"), key=lambda node: BLOCKS.cost(node, ["c01", "c02"])) == "c05"


def test_pairs_of_leaves_and_made_up_trees() -> None:
    """Those above the given nodes, each once."""
    tree = even(["a", "b", "c", "d", "e"], 2)
    assert tree.leaf_pairs(["a", "b", "c"]) == [("leaf-000", "leaf-001")]
    assert len(tree.leaf_pairs([*tree.leaf, "x"])) == 3
    apart = parse("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=c Nodes=n3\nSwitchName=s Switches=a,b\n")
    assert apart.leaf_pairs(["n1", "n2", "n3"]) == [("a", "b")], "Slurm starts no job on both sides"
    assert parse("BlockName=x Nodes=n1\nBlockName=y Nodes=n2").leaf_pairs(["n1", "n2"]) == [("x", "y")]
    assert (tree.hops("a", "b"), tree.hops("a", "e")) == (1, 3)


def test_the_topology_of_slurm_is_found(tmp_path: Path) -> None:
    """Beside slurm.conf or where slurmd keeps what was sent; a topology.yaml is the controller's to tell."""
    own, sent = tmp_path / "slurm", tmp_path / "conf"
    own.mkdir()
    asked: list[list[str]] = []

    def run(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        asked.append([*argv])
        return Output(0, SHOWN, "")

    def find(run: Runner = run) -> Topology:
        return read(environ={"SLURM_CONF": str(own / "slurm.conf")}, configless=sent, run=run)

    assert find() == Topology()
    sent.mkdir()
    (sent / "topology.conf").write_text("SwitchName=s1 Nodes=n1")
    assert find().leaf == {"n1": "s1"}
    (own / "slurm.conf").touch()
    assert find() == Topology()
    assert asked == []
    (own / "topology.yaml").touch()
    assert (find().leaf["n5"], asked) == ("leaf3", [["scontrol", "show", "topology"]])

    def silent(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        raise SlurmUnavailable("scontrol has not answered within 5 s")

    assert find(silent) == Topology()


def test_a_list_may_have_blanks_and_commas_without_a_name() -> None:
    """Slurm passes over them, so such a file works there (``scontrol show hostnames`` of 22.05.8)."""
    tree = parse(
        'SwitchName=leaf1 Nodes=n[1-2],\nSwitchName=leaf2 Nodes="n3, n[4-5]"\nSwitchName=top Switches=,leaf1,,leaf2'
    )
    assert tree.leaf == {"n1": "leaf1", "n2": "leaf1", "n3": "leaf2", "n4": "leaf2", "n5": "leaf2"}
    assert tree.above == {"leaf1": "top", "leaf2": "top"}


def test_a_file_may_include_others(tmp_path: Path) -> None:
    """As all files of Slurm may: by a name in its folder, or a whole one. One that cannot be read is told."""
    (tmp_path / "rack1").write_text("SwitchName=leaf1 Nodes=n1\n")
    (tmp_path / "topology.conf").write_text(
        f"Include rack1\n# include rack2\n include {tmp_path}/top\nSwitchName=leaf2 Nodes=n2"
    )
    with pytest.raises(TopologyError, match="top cannot be read: No such file"):
        read(tmp_path / "topology.conf")
    (tmp_path / "top").write_text("SwitchName=top Switches=leaf[1-2]\n")
    assert read(tmp_path / "topology.conf").hops("n1", "n2") == 3
    (tmp_path / "top").write_text("include rack1\ninclude topology.conf\n")
    with pytest.raises(TopologyError, match="include each other"):
        read(tmp_path / "topology.conf")


SEVERAL = """---
- topology: topo-switch  # for all
  cluster_default: true
  tree:
    switches:
      - {switch: sw_root, children: "s[1-2]"}
      - {switch: s1, nodes: "n[1-2]"}
      - {switch: s2, nodes: "n[3-4]"}
# - topology: old
- topology: "topo-block"
  block:
    block_sizes: [2]
    blocks:
      - {block: b1, nodes: "n[1-2]"}
      - {block: b2, nodes: "n[3-4]"}
- {"topology": topo-flat, flat: true}
"""


"""As SlinkyProject/slurm-operator shows one in its documentation."""


def test_a_cluster_with_several_topologies_has_switches_and_domains(tmp_path: Path) -> None:
    """``scontrol show topology`` tells the default one alone; the racks are in another."""
    shown = {
        "": "SwitchName=sw_root Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[1-2]\n"
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]\nSwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-4]\n",
        "topo-block": "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\n"
        "BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2\n",
        "topo-flat": "",
    }

    def run(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        name = "".join(argv[3:])
        return Output(0, shown["" if name == "topo-switch" else name], "")

    (tmp_path / "slurm.conf").touch()
    (tmp_path / "topology.yaml").write_text(SEVERAL)
    found = read(environ={"SLURM_CONF": str(tmp_path / "slurm.conf")}, run=run)
    assert found.domain == {"n1": "b1", "n2": "b1", "n3": "b2", "n4": "b2"}
    assert (found.leaf["n4"], found.hops("n1", "n2"), found.hops("n1", "n3")) == ("s2", 1, 3)


def test_two_topologies_are_no_nearer_for_a_name_that_both_have() -> None:
    """A switch s1 without a common node is another one; blocks stand for switches where there are none."""
    tree = parse("SwitchName=s1 Nodes=n1\nSwitchName=top Switches=s1")
    other = parse("SwitchName=s1 Nodes=n2\nSwitchName=s3 Nodes=n[3-4]\nSwitchName=top Switches=s[1,3]")
    assert tree.joined(other).hops("n1", "n2") is None
    assert [tree.joined(other).hops(node, "n3") for node in ("n1", "n2", "n4")] == [None, 3, 1]
    same = parse("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s3 Nodes=n3\nSwitchName=top Switches=s[1,3]")
    assert [tree.joined(same).hops("n1", node) for node in ("n2", "n3")] == [1, 3]
    assert tree.joined(tree) == tree
    block = parse("BlockName=b1 Nodes=n[1,3]\nBlockName=b2 Nodes=x1")
    for both in (block.joined(tree), tree.joined(block)):
        assert (both.leaf, both.above) == ({"n1": "s1", "n3": "b1", "x1": "b2"}, {"s1": "top"})
        assert both.domain == block.domain
    assert block.joined(parse("BlockName=b1 Nodes=y[1-2]")).domain == {
        **block.domain,
        "y1": "b1_other",
        "y2": "b1_other",
    }


def test_values_may_be_quoted_and_empty() -> None:
    """As Slurm's own reader of its files allows, and as scontrol shows a block whose nodes are all gone."""
    quoted = parse('SwitchName="leaf0" Nodes="n[0-1]"\nSwitchName = top Switches = "leaf0"\n')
    assert (quoted.leaf, quoted.above) == ({"n0": "leaf0", "n1": "leaf0"}, {"leaf0": "top"})
    gone = "BlockName=b0 BlockIndex=0 Nodes= BlockSize=2\nBlockName=b1 BlockIndex=1 Nodes=(null) BlockSize=2\n"
    assert parse(gone).nodes == {}
    assert parse("SwitchName=top Level=1 LinkSpeed=1 Nodes= Switches=leaf[0-1]").above.keys() == {"leaf0", "leaf1"}


def test_a_topology_of_blocks_as_releases_with_yaml_show_it() -> None:
    """Names of nodes may be addresses; an aggregate of blocks is no NVLink domain."""
    shown = (
        "BlockName=rack_b0 BlockIndex=0 Nodes=10.140.71.[103,115] BlockSize=2\n"
        "BlockName=rack_b1 BlockIndex=1 Nodes=10.140.79.152,10.140.93.120 BlockSize=2\n"
        "AggregatedBlock=rack_b[0-1] BlockIndex=2 Nodes=10.140.71.[103,115],10.140.79.152,10.140.93.120 BlockSize=4\n"
    )
    assert parse(shown).domain == {
        "10.140.71.103": "rack_b0", "10.140.71.115": "rack_b0", "10.140.79.152": "rack_b1", "10.140.93.120": "rack_b1",
    }  # fmt: skip


def test_a_block_without_nodes_is_no_obstacle() -> None:
    """A place kept for a rack that is to come, as topograph writes it; it ended all beside a second topology."""
    kept = parse("BlockName=b1 Nodes=n[1-2]\nBlockName=b2\nBlockName=b3 Nodes=n[3-4]\nBlockSizes=2\n")
    tree = parse("SwitchName=a Nodes=n[1-4]\n")
    assert [one.hops("n1", "n3") for one in (kept, kept.joined(tree), tree.joined(kept), kept.joined(kept))] == [
        None, 1, 1, None,
    ]  # fmt: skip


def test_rings_and_tori_are_unknown() -> None:
    """As 26.05.3 shows those of a topology.yaml: they have no switches, and none of their nodes is taken for near."""
    ring = "RingName=r1 Nodes=n[1-4] RingSize=4\n"
    torus = "TorusName=pod1 Dims=2x2x1 Nodes=n[1-4]\n  TorusName=pod1 PlacementDims=2x1x1(2) Anchors=2\n"
    assert parse(ring) == parse(torus) == Topology()
