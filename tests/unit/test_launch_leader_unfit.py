"""Nodes with broken hardware: the leader leaves them behind, in this start of the run and in the next."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from opsd import exitcodes
from opsd.launch.ranks.failure import RankError
from opsd.launch.run import messages
from tests.fakes.leader import NODES, SIGTERM, SPARE, LeaderHarness


@pytest.fixture
def stage(tmp_path: Path) -> LeaderHarness:
    return LeaderHarness.at_work(tmp_path)


def test_failing_hardware_is_left_behind(stage: LeaderHarness) -> None:
    """A rank that failed with its GPU gets another node, if there is one."""
    stage.fail("n3", 4, "hardware")
    stage.loop.advance(1)
    assert stage.slots[-1] == ("n1", "n2", SPARE)
    stage.begin().fail(SPARE, 4, "hardware")
    stage.loop.advance(1)
    assert stage.slots[-1] == ("n1", "n2", SPARE), "there is no other"


def fail_at_once(stage: LeaderHarness, node: str, rank: int) -> None:
    """A GPU that is gone: the ranks are started, and end before their first step."""
    error = RankError("AcceleratorError", "CUDA error: unspecified launch failure", "train.py:3")
    stage.fail(node, rank, "hardware", error=error)
    stage.loop.advance(1)


def test_a_run_without_a_spare_does_not_start_again_and_again_on_broken_hardware(tmp_path: Path) -> None:
    """Once more, since much goes away with a restart; then the job goes back into the queue, without that node."""
    stage = LeaderHarness.at_work(tmp_path, *NODES)
    fail_at_once(stage, "n2", 2)
    assert stage.slots == [NODES, NODES]
    fail_at_once(stage.begin(), "n2", 2)
    ((code, reason),) = stage.over
    assert code == exitcodes.REQUEUE
    assert "2 are there, 3 are needed; n2 is out: AcceleratorError: CUDA error" in reason
    assert stage.bad == [((), ("n2",))]


def test_each_node_that_a_waiting_run_loses_is_to_be_replaced(tmp_path: Path) -> None:
    """None runs ranks any more then, and still each is one less, its leader too; a spare of a run at work is not."""
    stage = LeaderHarness.at_work(tmp_path, *NODES, SPARE, wait_s=60.0)
    stage.lose(SPARE)
    stage.lose("n2")
    stage.begin().lose("n3")
    del stage.group.alive["n1"]
    stage.leader = stage.new_leader()
    stage.leader.take_over()
    lost = {event["lost"]: event["ranks"] for event in stage.events("node_lost")}
    assert lost == {SPARE: False, "n2": True, "n3": True, "n1": True}


def test_a_spare_is_fetched_for_a_node_that_is_proven_unfit(tmp_path: Path) -> None:
    """The run waits for it, also under another leader, and never goes back to the node."""
    stage = LeaderHarness.at_work(tmp_path, *NODES, wait_s=60.0)
    fail_at_once(stage, "n2", 2)
    fail_at_once(stage.begin(), "n2", 2)
    (wanted,) = stage.events("spare_wanted")
    assert (wanted["swap"], stage.slots[-1], stage.over) == ("n2", (), [])
    stage.begin().succeed()
    assert stage.slots[-1] == ()
    stage.join(SPARE)
    assert set(stage.slots[-1]) == {"n1", SPARE, "n3"}


def test_a_node_that_comes_again_is_as_bad_as_it_was_until_it_has_been_given_back(tmp_path: Path) -> None:
    """Also under another leader: what counts is whether it was out of service for its fault."""
    stage = LeaderHarness.at_work(tmp_path, *NODES, wait_s=60.0)
    fail_at_once(stage, "n2", 2)
    fail_at_once(stage.begin(), "n2", 2)
    retired = time.time()
    stage.lose("n2")
    stage.begin().succeed()
    stage.join("n2")
    stage.tell("n2", messages.GivenBack(retired - 60.0))
    assert (stage.slots[-1], stage.over) == ((), [])
    stage.tell("n2", messages.GivenBack(retired + 1.0))
    assert set(stage.slots[-1]) == set(NODES)
    assert [event["cleared"] for event in stage.events("node_cleared")] == ["n2"]
    fail_at_once(stage.begin(), "n2", 2)
    assert len(stage.events("spare_wanted")) == 1, "its earlier faults are forgotten"


def test_a_run_that_may_goes_on_without_a_node_that_is_proven_unfit(tmp_path: Path) -> None:
    """With the others, at the same global batch."""
    stage = LeaderHarness.at_work(tmp_path, *NODES, least=2)
    fail_at_once(stage, "n2", 2)
    fail_at_once(stage.begin(), "n2", 2)
    assert (stage.slots[-1], stage.over) == (("n1", "n3"), [])


def test_an_error_that_came_with_another_node_before_the_requeue_is_the_programs(tmp_path: Path) -> None:
    """The end of a start leaves for the next one what has failed where: requeues do not go on for ever."""
    memory: dict[str, Any] = {}
    for start, node in enumerate(("n1", "n2", "n3")):
        stage = LeaderHarness(tmp_path / node, *NODES)
        stage.group.inherited = memory
        stage.leader.take_over()
        for _ in range(2):
            if not stage.over:
                fail_at_once(stage.begin(), node, 0)
        memory = stage.group.memory
        assert [code for code, _ in stage.over] == [exitcodes.REQUEUE if start < 2 else exitcodes.REPEATED]
    assert "on 3 nodes" in stage.over[0][1]


def test_progress_before_the_requeue_counts_in_the_next_start(tmp_path: Path) -> None:
    """A start that begins at an earlier step has made none by reaching it again."""
    stage = LeaderHarness.at_work(tmp_path, *NODES)
    stage.tell("n1", messages.Progress(1, 900, 890))
    stage.fail("n2", 2, "signal", step=900)
    stage.loop.advance(1)
    stage.begin().stop("n1")
    stage.finish_ranks(*NODES, told=SIGTERM)
    later = LeaderHarness(tmp_path / "later", *NODES)
    later.group.inherited = stage.group.memory
    later.leader.take_over()
    for _ in range(2):
        later.begin().tell("n1", messages.Progress(later.generation, 895, 890))
        later.fail("n2", 2, "signal", step=895)
        later.loop.advance(1)
    assert [code for code, _ in later.over] == [exitcodes.REPEATED]


@pytest.mark.parametrize("memory", [{"policy": {}}, {"policy": {"furthest": "x", "same": 3, "user_errors": []}}])
def test_what_another_version_has_left_is_passed_over(tmp_path: Path, memory: dict[str, Any]) -> None:
    """The run starts all the same."""
    stage = LeaderHarness(tmp_path, *NODES)
    stage.group.inherited = memory
    stage.leader.take_over()
    assert stage.slots == [NODES]


def test_a_node_at_fault_twice_is_left_behind(stage: LeaderHarness) -> None:
    """One killed rank may be chance, two on the same node are a reason to use the spare."""
    stage.fail("n1", 0, "signal", step=3)
    stage.loop.advance(1)
    assert stage.slots[-1] == NODES
    stage.begin().fail("n1", 1, "signal", step=9)
    stage.loop.advance(1)
    assert stage.slots[-1] == (SPARE, "n2", "n3")
