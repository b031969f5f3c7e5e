"""Spares that say that they must not be used: the head of a run goes by that."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.head import NODES, SPARE, Stage


def started(folder: Path, *spares: str, wait_s: float = 0.0) -> Stage:
    """Three nodes at work, and these spares."""
    stage = Stage(folder, *NODES, *spares, wait_s=wait_s)
    stage.head.take_over(None, {})
    stage.loop.advance(3)
    return stage.begun()


def test_a_spare_that_is_not_ready_is_not_used(tmp_path: Path) -> None:
    """It says why, which is told once; the run waits for it, and goes on once it is ready."""
    stage = started(tmp_path, SPARE, wait_s=60.0)
    for _ in range(2):
        stage.tell(SPARE, "readiness", why="data: x was damaged")
    (refused,) = stage.events("spare_refused")
    assert (refused["refused"], refused["reason"]) == (SPARE, "data: x was damaged")
    stage.lose("n2")
    stage.loop.advance(30)
    assert (stage.slots, stage.over) == ([NODES], [])
    stage.tell(SPARE, "readiness", why="")
    assert stage.slots == [NODES, ("n1", SPARE, "n3")]


def test_a_spare_may_turn_out_not_to_be_ready(tmp_path: Path) -> None:
    """Asked once more when it is about to be used: the proposal is made anew without it."""
    stage = started(tmp_path, SPARE, "n5")
    stage.lose("n2")
    assert stage.slots[-1] == ("n1", SPARE, "n3")
    stage.tell(SPARE, "readiness", why="its last verification is too old")
    assert stage.slots[-1] == ("n1", "n5", "n3")


def test_the_run_ends_without_a_spare_that_is_ready(tmp_path: Path) -> None:
    """It is given back to Slurm rather than go on with damaged data; the spare is not held against the next start."""
    stage = started(tmp_path, SPARE)
    stage.lose("n2")
    stage.tell(SPARE, "readiness", why="data: x was damaged")
    stage.loop.advance(1)
    assert [code for code, _ in stage.over] == [75]
    assert stage.bad == [(("n2",), ())]


def test_a_node_is_not_swapped_for_a_spare_that_is_not_ready(tmp_path: Path) -> None:
    """The ranks run on, and the answer says why."""
    stage = started(tmp_path, SPARE)
    stage.tell(SPARE, "readiness", why="software: torch is missing, 2.9 is wanted")
    stage.tell("n1", "swap", node="n2", reason="ecc")
    assert stage.events("swap_refused")[0]["swap"] == "n2"
    assert not any(order["kind"] == "order_stop" for order in stage.quorum.orders)
