"""Which nodes the leader of a run takes for a generation, and when; its peers and the time are simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.leader import NODES, SPARE, LeaderHarness


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
