"""Which nodes the leader takes, and which places they get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.collectors.lib.nvml.driver import common_domain
from opsd.commands.launch_settings import segment_of_trainer
from opsd.launch.io.run_log import EventText
from opsd.launch.ranks.settings import Program
from opsd.launch.run.nodes import RunShape, assign_slots
from opsd.launch.run.nvlink_domain import imex_problem
from opsd.slurm.topology import parse
from tests.fakes.leader import NODES, SPARE, LeaderHarness

# Which nodes the leader of a run takes for a generation, and when; its peers and the time are simulated.


@pytest.fixture
def stage(tmp_path: Path) -> LeaderHarness:
    return LeaderHarness.at_work(tmp_path)


def test_the_nodes_of_the_allocation_come_first(stage: LeaderHarness) -> None:
    """The first generation has the wanted number of nodes in the order of the allocation; the rest are spares."""
    assert stage.slots == [NODES]
    (event,) = stage.events("generation_started")
    assert (event["world_size"], event["nodes"], event["spares"]) == (6, list(NODES), [SPARE])


def test_a_spare_takes_the_place_of_a_lost_node(stage: LeaderHarness) -> None:
    """The other nodes keep their places, and so what they have in memory."""
    stage.lose("n2")
    assert stage.slots[-1] == ("n1", SPARE, "n3")
    stage.begin()
    assert stage.events("node_lost")[0]["lost"] == "n2"
    assert stage.events("spare_joined")[0]["joined"] == SPARE


def test_fewer_nodes_go_on_if_the_run_allows_it(tmp_path: Path) -> None:
    """Without a spare the places close up, down to the least number of nodes."""
    stage = LeaderHarness.at_work(tmp_path, *NODES, least=2)
    stage.lose("n1")
    assert stage.slots[-1] == ("n2", "n3")
    stage.begin().lose("n2")
    stage.loop.advance(1)
    assert stage.over == [(exitcodes.REQUEUE, "too few nodes are left: 1 are there, 2 are needed")]
    assert stage.bad == [(("n1", "n2"), ())]


def test_a_node_that_comes_back_is_a_spare(stage: LeaderHarness) -> None:
    """It has lost its place, and takes that of the next one that is lost."""
    stage.lose("n2")
    stage.begin().join("n2")
    assert len(stage.slots) == 2
    stage.lose("n3")
    assert stage.slots[-1] == ("n1", SPARE, "n2")


def test_a_spare_that_was_never_lost_comes_first(stage: LeaderHarness) -> None:
    """A node that flaps is likely to do so again, at any place in the allocation."""
    stage.lose("n2")
    stage.begin().join("n2", "n5")
    stage.lose("n3")
    assert stage.slots[-1] == ("n1", SPARE, "n5")


def test_a_node_lost_during_a_proposal_replaces_it(stage: LeaderHarness) -> None:
    """The next proposal does without both."""
    stage.join("n5")
    stage.lose("n2")
    stage.lose("n3")
    assert stage.slots[-2:] == [("n1", SPARE, "n3"), ("n1", SPARE, "n5")]


def test_the_first_generation_waits_for_its_nodes(tmp_path: Path) -> None:
    """Launchers that hear too few do not claim; a leader that loses them first claims that it waits for more."""
    stage = LeaderHarness(tmp_path, "n1", least=2, most=3, wait_s=60.0)
    stage.leader.take_over()
    assert stage.slots == [()]
    stage.join("n2")
    assert stage.slots == [(), ("n1", "n2")]


def test_a_spare_that_comes_later_disturbs_nobody(stage: LeaderHarness) -> None:
    """Nothing is claimed for it; it takes the place of the next one that is lost."""
    stage.join("n5")
    assert (stage.slots, stage.events("launcher_joined")[0]["joined"]) == ([NODES], "n5")
    stage.lose(SPARE, "n2")
    assert stage.slots[-1] == ("n1", "n5", "n3")


def test_ranks_run_on_under_the_next_leader(stage: LeaderHarness) -> None:
    """All of their nodes are there: it claims that it leads, and what happens under it is about the same ranks."""
    stage.lose(SPARE)
    stage.succeed()
    plan = stage.group.proposals[-1]
    assert (plan.number, plan.slots, plan.payload["keep"], plan.generation) == (2, NODES, 1, 1)
    assert len(stage.events("generation_started")) == 1
    stage.fail("n2", 2, "signal")
    stage.loop.advance(1)
    assert stage.group.proposals[-1].payload["keep"] == 0


def test_a_leader_that_ran_no_ranks_is_lost_alone(tmp_path: Path) -> None:
    """Its death is noted, and restarts nothing."""
    stage = LeaderHarness.at_work(tmp_path)
    del stage.group.alive[SPARE]
    stage.succeed()
    assert [event["lost"] for event in stage.events("node_lost")] == [SPARE]
    assert stage.group.proposals[-1].payload["keep"] == 1


def test_a_leader_that_ran_ranks_is_a_loss(stage: LeaderHarness) -> None:
    """Its successor begins the next generation with the spare in its place, and the restart counts."""
    del stage.group.alive["n3"]
    stage.succeed()
    plan = stage.group.proposals[-1]
    assert (plan.slots, plan.payload["keep"], plan.payload["restarts"]) == (("n1", "n2", SPARE), 0, 1)


@pytest.mark.parametrize("holds", [False, True])
def test_what_had_not_begun_is_begun_again(stage: LeaderHarness, holds: bool) -> None:
    """By the next leader, or the same again: a process that was ready may have been replaced by one that was not."""
    stage.group.begun, stage.group.holds = False, holds
    stage.leader = stage.new_leader()
    stage.leader.take_over()
    plan = stage.group.proposals[-1]
    assert (plan.slots, plan.payload["keep"]) == (NODES, 0)


def test_a_node_at_work_that_is_lost_while_a_leader_takes_over_is_a_failure(stage: LeaderHarness) -> None:
    """The claim to lead is replaced by that of the next generation, and the restart counts."""
    stage.leader, stage.group.holds = stage.new_leader(), False
    stage.leader.take_over()
    stage.lose("n2")
    plan = stage.group.proposals[-1]
    assert (plan.slots, plan.payload["keep"], plan.payload["restarts"]) == (("n1", SPARE, "n3"), 0, 1)


def test_a_stop_while_a_node_is_missing_ends_the_run_at_once(tmp_path: Path) -> None:
    """Ranks that wait for those of the lost node cannot stop in good order; the node need not be waited for."""
    stage = LeaderHarness.at_work(tmp_path, *NODES, wait_s=30.0)
    stage.lose("n3")
    stage.stop("n1")
    stage.loop.advance(60)
    assert stage.over == [(exitcodes.REQUEUE, "stopped between generations after SIGTERM")]


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """When its time is up, the leader says how many have come."""
    stage = LeaderHarness.at_work(tmp_path, *NODES, wait_s=30.0)
    stage.lose("n3")
    stage.loop.advance(31)
    assert stage.slots[-1] == ()
    assert stage.over == [(exitcodes.REQUEUE, "too few nodes are left: 2 are there, 3 are needed")]


def test_a_new_leader_waits_for_the_others_to_find_it(stage: LeaderHarness) -> None:
    """It ends nothing for want of nodes in its first seconds."""
    for name in ("n2", "n3"):
        del stage.group.alive[name]
    stage.leader, stage.group.holds = stage.new_leader(), False
    stage.leader.take_over()
    assert (stage.slots[-1], stage.over) == ((), [])
    stage.join("n2")
    assert stage.slots[-1] == ("n1", "n2", SPARE)


def test_nodes_lost_together_take_one_proposal(tmp_path: Path) -> None:
    """A switch takes many with it: the first proposal leaves all of them out, and a node of its own makes another."""
    stage = LeaderHarness.at_work(tmp_path, *NODES, SPARE, least=1)
    stage.lose("n2", "n3")
    assert stage.slots[1:] == [("n1", SPARE)]
    stage.lose(SPARE)
    assert stage.slots[2:] == [("n1",)]


# Which spare takes a place, what the events say of it, and segments that are to stay in one NVLink domain.


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


# The segment of a run of the included trainer follows from its tensor and expert parallel degrees.


def trainer(*args: str) -> Program:
    return Program("module", "opsd.trainer", args, "python", Path("/"))


@pytest.mark.parametrize(("args", "local_size", "segment"), [
    (("--set", "parallel.tp=4", "--set=data.shards=/x", "--fresh", "--", "smollm3-3b"), 2, 2),
    (("tiny-moe", "--set", "data.shards=/x", "--set", "parallel.ep=8", "--set", "parallel.tp=2"), 4, 4),
    (("tiny-moe", "--set", "data.shards=/x", "--set", "parallel.ep=4"), 8, 1),
    (("smollm3-3b", "--set", "data.shards=/x", "--set", "parallel.tp=4"), 3, 1),
])  # fmt: skip
def test_a_group_of_several_nodes_is_a_segment(args: tuple[str, ...], local_size: int, segment: int) -> None:
    """A group inside a node is none, nor is one that ends in the middle of a node."""
    assert segment_of_trainer(trainer(*args), local_size) == segment


@pytest.mark.parametrize("program", [
    Program("module", "torchtitan.train", ("tiny", "--set", "parallel.tp=4"), "python", Path("/")),
    trainer(),
    trainer("tiny", "--set"),
    trainer("no-such-preset", "--set", "parallel.tp=4"),
])  # fmt: skip
def test_unknown_is_no_segment(program: Program) -> None:
    """Other programs, and command lines that the trainer itself refuses, in words of its own."""
    assert segment_of_trainer(program, 2) == 1


# What a launcher says of the IMEX daemon of its node before a run on several nodes.


DOMAIN = "5e797fc6-0f46-421a-8724-0e102c0f723c.1"


@pytest.mark.parametrize(
    ("script", "domain", "said"),
    [
        ("echo READY", DOMAIN, ""),
        ("echo WAITING_FOR_PEERS", DOMAIN, "is WAITING_FOR_PEERS, not READY"),
        ("echo UNAVAILABLE", "", "is UNAVAILABLE, not READY"),
        ("echo connection refused >&2; exit 1", DOMAIN, "cannot be asked: connection refused"),
        ("exit 3", DOMAIN, "cannot be asked: exit code 3"),
        ("exec sleep 60", DOMAIN, "cannot be asked: no answer within 1.5 s"),
        ("echo connection refused >&2; exit 1", "", ""),
    ],
)
def test_a_daemon_that_is_not_ready_is_told(tmp_path: Path, script: str, domain: str, said: str) -> None:
    """One that gives no answer is unknown: it is told only on a node that shares an NVLink domain."""
    control = tmp_path / "nvidia-imex-ctl"
    control.write_text(f'#!/bin/sh\n[ "$*" = -q ] || exit 9\n{script}\n')
    control.chmod(0o755)
    problem = imex_problem(domain, control)
    assert said in problem
    assert bool(problem) is bool(said)


def test_a_node_without_the_tool_has_no_daemon_to_speak_of(tmp_path: Path) -> None:
    """Unless it shares a domain: then its GPUs reach no others."""
    assert imex_problem("", tmp_path / "none") == ""
    assert "is not there" in imex_problem(DOMAIN, tmp_path / "none")
