"""A run with fewer nodes than it may have, and spares that come."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.launch.run import messages
from opsd.launch.run.messages import Stop, StopOrdered, StopReason
from tests.fakes.leader import LeaderHarness

FEW = ("n1", "n2")
EVERY_S = 30.0
"""Between two checkpoints."""


def small(folder: Path, *, most: int = 3, grow_s: float = 60.0) -> LeaderHarness:
    """Two nodes at work, of up to ``most``."""
    return LeaderHarness.at_work(folder, *FEW, least=2, most=most, grow_s=grow_s)


def train(stage: LeaderHarness, seconds: float) -> None:
    """Let time pass, with a checkpoint now and then."""
    for _ in range(int(seconds / EVERY_S)):
        stage.loop.advance(EVERY_S)
        step = int(stage.loop.now)
        stage.tell("n1", messages.Progress(stage.generation, step, step))


def grow_of(*nodes: str) -> Stop:
    return Stop(StopReason.GROW, ", ".join(nodes))


def test_a_spare_is_taken_in_once_as_much_was_missed_as_a_restart_costs(tmp_path: Path) -> None:
    """A third of the speed is missing: 60 s of work after 180 s. The ranks stop in order, after a checkpoint."""
    stage = small(tmp_path)
    train(stage, 300.0)
    stage.join("n3")
    train(stage, 150.0)
    assert stage.group.orders == []
    train(stage, 30.0)
    assert stage.group.orders == [StopOrdered(1, grow_of("n3"))]
    stage.finish_ranks(*FEW, told=grow_of("n3"))
    assert (stage.slots[-1], stage.over) == (("n1", "n2", "n3"), [])
    assert stage.group.proposals[-1].payload["restarts"] == 0
    train(stage.begin(), 900.0)
    assert len(stage.slots) == 2


def test_the_more_is_missing_the_sooner_it_pays(tmp_path: Path) -> None:
    """Half of the speed: 60 s of work after 120 s."""
    stage = small(tmp_path, most=4)
    stage.join("n3", "n4")
    train(stage, 120.0)
    assert stage.group.orders == [StopOrdered(1, grow_of("n3", "n4"))]


def test_nothing_is_restarted_for_a_spare_that_must_not_be_used_or_is_not_needed(tmp_path: Path) -> None:
    """Nor where growing is turned off, or no checkpoint shows that nothing would be lost."""
    stages = {name: small(tmp_path / name, grow_s=60.0 * (name != "off")) for name in ("unready", "off", "unsaved")}
    for stage in stages.values():
        stage.join("n3")
    stages["unready"].tell("n3", messages.Readiness("data: x was damaged"))
    train(stages["unready"], 900.0)
    train(stages["off"], 900.0)
    stages["unsaved"].loop.advance(900.0)
    whole = small(tmp_path / "whole", most=2)
    whole.join("n3")
    train(whole, 900.0)
    assert [stage.group.orders for stage in (*stages.values(), whole)] == [[]] * 4


def test_a_spare_that_comes_and_goes_costs_no_more_than_was_missed(tmp_path: Path) -> None:
    """Ten hours, in which it is there for every other two minutes: at most one restart a minute of missed work."""
    stage, missed_s = small(tmp_path), 0.0
    for _ in range(150):
        stage.join("n3")
        train(stage, 120.0)
        missed_s += 40.0 * (len(stage.slots[-1]) == 2)
        if stage.group.orders:
            stage.finish_ranks(*FEW, told=grow_of("n3"))
            stage.begin().lose("n3")
            stage.begin()
            stage.group.orders.clear()
        else:
            stage.lose("n3")
        train(stage, 120.0)
    grown = sum(slots == ("n1", "n2", "n3") for slots in stage.slots)
    assert 0 < grown <= missed_s / 60.0


@pytest.mark.parametrize("late", [False, True])
def test_growth_outlives_its_leader(tmp_path: Path, *, late: bool) -> None:
    """The next one learns from the ranks' end why they have stopped; no node is held to be unfit for it."""
    stage = small(tmp_path)
    stage.join("n3")
    train(stage, 180.0)
    stage.succeed()
    if late:
        stage.tell("n1", messages.Late(stage.generation, "rank 0 did not stop in time", grow_of("n3")))
    else:
        stage.finish_ranks(*FEW, told=grow_of("n3"))
    assert (stage.slots[-1], stage.over) == (("n1", "n2", "n3"), [])
    assert stage.group.proposals[-1].payload["unfit"] == []


def test_a_stop_comes_before_growth(tmp_path: Path) -> None:
    """The run ends as it was asked to."""
    stage = small(tmp_path)
    stage.join("n3")
    stage.stop("n1")
    train(stage, 900.0)
    assert len(stage.group.orders) == 1
