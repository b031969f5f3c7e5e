"""Which nodes the head of a run takes for a generation, and when; its fellows and the time are played."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.head import NODES, SPARE, Stage, member


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage.at_work(tmp_path)


def test_the_nodes_of_the_allocation_come_first(stage: Stage) -> None:
    """The first generation has the wanted number of nodes in the order of the allocation; the rest are spares."""
    assert stage.slots == [NODES]
    (event,) = stage.events("generation_started")
    assert (event["world_size"], event["nodes"], event["spares"]) == (6, list(NODES), [SPARE])


def test_a_spare_takes_the_place_of_a_lost_node(stage: Stage) -> None:
    """The other nodes keep their places, and so what they have in memory."""
    stage.lose("n2")
    assert stage.slots[-1] == ("n1", SPARE, "n3")
    stage.begun()
    assert stage.events("node_lost")[0]["lost"] == "n2"
    assert stage.events("spare_joined")[0]["joined"] == SPARE


def test_fewer_nodes_go_on_if_the_run_allows_it(tmp_path: Path) -> None:
    """Without a spare the places close up, down to the least number of nodes."""
    stage = Stage(tmp_path, *NODES, least=2)
    stage.head.take_over(None, {})
    stage.loop.advance(2)
    stage.begun().lose("n1")
    assert stage.slots[-1] == ("n2", "n3")
    stage.begun().lose("n2")
    stage.loop.advance(1)
    assert stage.over == [(exitcodes.REQUEUE, "too few nodes are left: 1 are there, 2 are needed")]
    assert stage.bad == [(("n1", "n2"), ())]


def test_a_node_that_comes_back_is_a_spare(stage: Stage) -> None:
    """It has lost its place, and takes that of the next one that is lost."""
    stage.lose("n2")
    stage.begun()
    stage.quorum.alive["n2"] = member("n2")
    stage.head.joined(member("n2"))
    assert len(stage.slots) == 2
    stage.lose("n3")
    assert stage.slots[-1] == ("n1", SPARE, "n2")


def test_a_node_lost_during_a_proposal_replaces_it(stage: Stage) -> None:
    """The next proposal does without both."""
    stage.quorum.alive["n5"] = member("n5")
    stage.lose("n2")
    stage.lose("n3")
    assert stage.slots[-2:] == [("n1", SPARE, "n3"), ("n1", SPARE, "n5")]


def test_the_first_generation_waits_for_its_nodes(tmp_path: Path) -> None:
    """Too few: not before the last has come. Enough, but not all that are expected: a little longer."""
    stage = Stage(tmp_path, "n1", least=2, most=3)
    stage.head.take_over(None, {})
    stage.loop.advance(10)
    assert stage.slots == []
    for name in ("n2", "n3"):
        stage.quorum.alive[name] = member(name)
        stage.head.joined(member(name))
    assert stage.slots == []
    stage.loop.advance(2)
    assert stage.slots == [NODES]


def test_a_spare_that_comes_later_gets_a_vote(stage: Stage) -> None:
    """The members are agreed on anew; the ranks run on, and what happens meanwhile is not overheard."""
    stage.quorum.alive["n5"] = member("n5")
    stage.head.joined(member("n5"))
    stage.loop.advance(1)
    plan = stage.quorum.proposals[-1]
    assert (plan.slots, plan.payload["keep"]) == (NODES, 1)
    stage.fail("n2", 2, "signal")
    stage.loop.advance(1)
    assert stage.quorum.proposals[-1].payload["keep"] == 0


def test_a_node_at_work_that_is_lost_meanwhile_is_a_failure(stage: Stage) -> None:
    """What the members were about to agree on is replaced by the next generation, and the restart counts."""
    stage.quorum.alive["n5"] = member("n5")
    stage.head.joined(member("n5"))
    stage.loop.advance(1)
    stage.lose("n2")
    plan = stage.quorum.proposals[-1]
    assert (plan.slots, plan.payload["keep"], plan.payload["restarts"]) == (("n1", SPARE, "n3"), 0, 1)


def test_a_stop_while_a_node_is_missing_ends_the_run_at_once(tmp_path: Path) -> None:
    """Ranks that wait for those of the lost node cannot stop in good order; the node need not be waited for."""
    stage = Stage(tmp_path, *NODES, wait_s=30.0)
    stage.head.take_over(None, {})
    stage.loop.advance(2)
    stage.begun().lose("n3")
    stage.tell("n1", "stop", by="SIGTERM")
    stage.loop.advance(60)
    assert stage.over == [(exitcodes.REQUEUE, "stopped between generations after SIGTERM")]


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """When its time is up, the head says how many have come."""
    stage = Stage(tmp_path, "n1", "n2")
    stage.head.take_over(None, {})
    stage.loop.advance(61)
    assert stage.over == [(exitcodes.FAILED, "not enough launchers have come: 2 are there, 3 are needed")]
    assert stage.quorum.orders[-1]["kind"] == "finish"
