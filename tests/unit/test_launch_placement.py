"""Which spare takes a place, what the events say of it, and segments that are to stay in one NVLink domain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opsd.collectors.lib.nvml.driver import common_domain
from opsd.launch.io.run_log import EventText
from opsd.launch.run.nodes import RunShape, assign_slots
from opsd.slurm.topology import parse
from tests.fakes.leader import LeaderHarness

TREE = parse("""\
SwitchName=leaf1 Nodes=n[1-3]
SwitchName=leaf2 Nodes=n[4-6]
SwitchName=leaf3 Nodes=n[7-9]
SwitchName=spine1 Switches=leaf[1-2]
SwitchName=spine2 Switches=leaf3
SwitchName=core Switches=spine[1-2]
""")
RACKS = parse("BlockName=rack1 Nodes=a[1-5]\nBlockName=rack2 Nodes=b[1-5]\nBlockSizes=4")
ALL = (*sorted(RACKS.leaf),)


def test_the_nearest_spare_takes_the_place() -> None:
    """The same leaf, then the same spine; one that the topology lacks comes last, and flaps count more."""
    shape = RunShape(2, 2, ("n1", "n4", "x", "n7", "n5", "n2"), topology=TREE)
    run = ("n1", "n4")
    assert assign_slots(shape, run, {"n1", "x", "n7", "n5", "n2"}, ()) == ("n1", "n5")
    assert assign_slots(shape, run, {"n1", "x", "n7", "n2"}, ()) == ("n1", "n2")
    assert assign_slots(shape, run, {"n1", "x", "n7"}, ()) == ("n1", "n7")
    assert assign_slots(shape, run, {"n1", "x"}, ()) == ("n1", "x")
    assert assign_slots(shape, run, {"n1", "n5", "n7"}, (), {"n5": 1}) == ("n1", "n7")
    assert assign_slots(shape, run, {"n1", "n5", "n7"}, (), {"n7": 1}, {"n5"}) == ("n1", "n7")
    assert assign_slots(shape, run, {"n1", "n5"}, (), {}, {"n5"}) == ("n1", "n5")


def test_a_spare_without_a_bad_way_comes_before_a_near_one(tmp_path: Path) -> None:
    """Also before one that was never lost; where there is no other, the event says which way is bad."""
    tree = replace(TREE, bad={("leaf1", "leaf2"): "1.2 GB/s, yesterday"})
    shape = RunShape(2, 2, ("n1", "n2", "n4", "n7"), topology=tree)
    assert assign_slots(shape, ("n1", "n2"), {"n1", "n4", "n7"}, (), {"n7": 1}) == ("n1", "n7")
    assert assign_slots(shape, ("n1", "n2"), {"n1", "n4"}, ()) == ("n1", "n4")
    first = RunShape(3, 3, ("n1", "n4", "n7", "n2"), topology=tree)
    assert assign_slots(first, (), first.order, ()) == ("n1", "n7", "n2")
    assert assign_slots(first, (), ("n1", "n4", "n7"), ()) == ("n1", "n4", "n7")
    stage = LeaderHarness.at_work(tmp_path, topology=tree)
    stage.lose("n2")
    stage.begin()
    (joined,) = stage.events("spare_joined")
    said = "the way between leaf1 and leaf2 was bad when last measured (1.2 GB/s, yesterday)"
    assert joined["bad_ways"] == [said]
    assert EventText().sentence(joined).endswith(f"n2 was 1.0; {said}")


def test_the_first_ranks_are_whole_segments() -> None:
    """What is left over of each rack stands by; without a segment the order is that of the job."""
    assert assign_slots(RunShape(8, 8, ALL, topology=RACKS, segment=4), (), ALL, ()) == (*ALL[:4], *ALL[5:9])
    assert assign_slots(RunShape(8, 8, ALL, topology=RACKS), (), ALL, ()) == ALL[:8]


def test_a_lemon_is_no_node_of_the_first_ranks_where_others_are_enough() -> None:
    """It stands by, with segments and without; of too few nodes it is one."""
    shape = RunShape(8, 8, ALL, topology=RACKS, segment=4)
    assert assign_slots(shape, (), ALL, (), {}, {"a2"}) == ("a1", "a3", "a4", "a5", *ALL[5:9])
    assert assign_slots(shape, (), {*ALL} - {"a5", "b5"}, (), {}, {"a2"}) == ("a1", "a3", "a4", "a2", *ALL[5:9])
    assert assign_slots(RunShape(8, 8, ALL), (), ALL, (), {}, {"a2"}) == ("a1", *ALL[2:9])


def test_the_first_plan_leaves_out_what_is_known_at_the_start(tmp_path: Path) -> None:
    """Before any node has told of itself; a node that then says otherwise is a spare like others."""
    stage = LeaderHarness(tmp_path, "n1", "n2", "n3", "n4", lemons=frozenset({"n2"}))
    stage.leader.take_over()
    assert stage.begin().slots == [("n1", "n3", "n4")]
    stage.lose("n3")
    assert stage.slots[-1] == ("n1", "n2", "n4")


def test_a_spare_comes_from_the_rack_of_the_segment() -> None:
    """Also where an earlier swap had to take one from elsewhere."""
    shape = RunShape(8, 8, ALL, topology=RACKS, segment=4)
    begun = (*ALL[:4], *ALL[5:9])
    swapped = assign_slots(shape, begun, {*ALL} - {"b2"}, ())
    assert swapped == ("a1", "a2", "a3", "a4", "b1", "b5", "b3", "b4")
    elsewhere = assign_slots(shape, swapped, {*ALL} - {"b2", "b5"}, ())
    assert elsewhere == ("a1", "a2", "a3", "a4", "b1", "a5", "b3", "b4")
    assert assign_slots(shape, elsewhere, {*ALL} - {"a5"}, ()) == (*swapped[:5], "b2", "b3", "b4")


def test_the_drivers_know_the_domains_of_a_tree(tmp_path: Path) -> None:
    """All nodes are below one switch, in two racks: the segment stays in one, and a swap that leaves it is told."""
    stage = LeaderHarness(
        tmp_path, "n1", "n2", "n3", "n4", least=2, most=2, topology=parse("SwitchName=s Nodes=n[1-4]"), segment=2
    )
    domains = {"n1": "a.1", "n2": "b.1", "n3": "a.1", "n4": "b.1"}
    stage.group.alive = {name: replace(one, domain=domains[name]) for name, one in stage.group.alive.items()}
    stage.leader.take_over()
    stage.begin()
    assert stage.group.proposals[-1].slots == ("n1", "n3")
    assert stage.events("segment_split") == []
    stage.lose("n3")
    stage.begin()
    (split,) = stage.events("segment_split")
    assert split["places"] == {"a.1": ["n1"], "b.1": ["n2"]}


def test_the_driver_overrides_and_completes_a_block() -> None:
    """A block that is one domain is another name of it; of one that is two, nodes that tell nothing keep the block."""
    assert RACKS.with_domains({"a1": "x.1", "b1": "y.1"}).domain == dict.fromkeys(ALL[:5], "x.1") | dict.fromkeys(
        ALL[5:], "y.1"
    )
    mixed = RACKS.with_domains({"a1": "x.1", "a2": "x.2"})
    assert [mixed.place(name) for name in ("a1", "a2", "a3", "b1")] == ["x.1", "x.2", "rack1", "rack2"]


def test_a_node_is_in_the_domain_of_all_its_gpus() -> None:
    """One that is in none, or in another, leaves the node without."""
    assert common_domain([("u", 7), ("u", 7)]) == "u.7"
    assert (
        common_domain([("u", 7), ("u", 8)])
        == common_domain([("u", 7), None])
        == common_domain([None])
        == common_domain([])
        == ""
    )


def test_the_events_say_what_a_swap_costs(tmp_path: Path) -> None:
    """In hops, and which segment has left its place."""
    topology = parse("SwitchName=l1 Nodes=n[1-3]\nSwitchName=l2 Nodes=n4\nSwitchName=s Switches=l[1-2]")
    stage = LeaderHarness.at_work(tmp_path, topology=topology, segment=3)
    assert stage.events("segment_split") == []
    stage.lose("n2")
    stage.begin()
    (joined,) = stage.events("spare_joined")
    assert (joined["replaces"], joined["hops_before"], joined["hops"]) == ("n2", 1.0, 3.0)
    assert EventText().sentence(joined) == "n4 stands by and takes place 1; it is 3.0 hops from the others, n2 was 1.0"
    (split,) = stage.events("segment_split")
    assert (split["first"], split["last"], split["places"]) == (0, 2, {"l1": ["n1", "n3"], "l2": ["n4"]})
    assert "(n1, n3 in l1; n4 in l2)" in EventText().sentence(split)


def test_without_a_topology_no_hops_are_told(tmp_path: Path) -> None:
    """Unknown is not near."""
    stage = LeaderHarness.at_work(tmp_path, segment=3)
    stage.lose("n2")
    stage.begin()
    (joined,) = stage.events("spare_joined")
    assert (joined["replaces"], "hops" in joined) == ("n2", False)
    assert stage.events("segment_split") == []
