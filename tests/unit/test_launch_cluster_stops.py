"""How a launcher with peers stops: signals to its node, planned swaps, and borrowed nodes that leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.launch.claims.messages import Begun
from opsd.launch.io.console import Console
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import EventLog, flush
from opsd.launch.ranks.settings import Program, Settings
from opsd.launch.ranks.shutdown import SECOND_STOP_S
from opsd.launch.ranks.workers import RankStarter
from opsd.launch.run.cluster import UNBEGUN_S
from opsd.launch.run.messages import (
    CODEC,
    Leaving,
    Readiness,
    Stop,
    StopOrdered,
    StopReason,
    StopWanted,
)
from opsd.launch.run.supervisor import Supervisor
from opsd.rundir import RunFolders
from tests.fakes.cluster import FollowerLauncher
from tests.fakes.leader import NODES, SIGTERM, swap_of


def test_a_signal_during_a_swap_is_told_as_what_it_is(follower: FollowerLauncher) -> None:
    """To the next leader too: it would take it for the swap, and go on."""
    follower.run.received("n1", CODEC.encode(StopOrdered(1, swap_of("n3"))))
    follower.run.asked_to_stop("SIGTERM")
    follower.elect("n3")
    assert [message for message in follower.hear() if isinstance(message, StopWanted)] == [StopWanted(SIGTERM)] * 2


@pytest.mark.parametrize("generation", [1, 2])
def test_a_stop_is_for_the_ranks_that_it_means(follower: FollowerLauncher, generation: int) -> None:
    """Not for those that have replaced them when it comes, late; and for those that it comes too early for."""
    follower.prepare(2, *NODES)
    order = CODEC.encode(StopOrdered(generation, swap_of("n3")))
    if generation == 2:
        follower.run.received("n1", order)
    follower.run.begin(follower.plan(2, *NODES), Begun("10.0.0.1", 1))
    follower.run.received("n1", order)
    assert follower.node.stopping == ("the swap of n3" if generation == 2 else "")


def test_a_message_of_another_version_is_named(follower: FollowerLauncher, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence with the sender and what is wrong, and nothing else happens."""
    follower.run.received("n1", {"kind": "dance"})
    follower.run.received("n1", {"kind": "stop_ordered", "generation": 1, "stop": {"why": "boredom"}})
    flush(20)
    said = capfd.readouterr().err
    assert "n1 sends a message of the unknown kind 'dance'; it is ignored" in said
    assert (
        "n1 sends a message 'stop_ordered' whose stop.why is not one of signal, request, swap, grow; it is ignored"
        in said
    )
    assert follower.node.stopping == ""


def test_a_borrowed_node_that_stands_by_goes_alone() -> None:
    """The end of its own job is not the run's, whether it has joined already or not."""
    follower, new = FollowerLauncher(borrowed=True), FollowerLauncher(borrowed=True)
    follower.begin(1, "n1", "n3", spares=("n2",))
    for borrowed in (follower, new):
        borrowed.run.asked_to_stop("SIGTERM")
        assert borrowed.node.left == (exitcodes.INTERRUPTED, "n2 goes: its own job ends (SIGTERM)")
    assert follower.hear() + new.hear() == [Readiness("")]


def test_a_borrowed_node_at_work_goes_once_it_is_replaced() -> None:
    """It asks again whenever that may have become possible: a spare has come, or another leader."""
    borrowed = FollowerLauncher(borrowed=True)
    borrowed.begin(1, *NODES)
    borrowed.run.asked_to_stop("SIGUSR1")
    borrowed.begin(2, *NODES, spares=("n4",), keep=1)
    borrowed.elect("n3")
    assert borrowed.hear() == [Leaving(1, "its own job ends (SIGUSR1)")] * 3
    assert (borrowed.node.left, borrowed.node.stopping) == (None, "")
    borrowed.begin(3, "n1", "n4", "n3", spares=("n2",))
    assert borrowed.node.left is not None
    assert borrowed.node.left[0] == exitcodes.INTERRUPTED


def test_the_run_can_be_stopped_on_a_borrowed_node_too() -> None:
    """By its control socket: that is about the run."""
    borrowed = FollowerLauncher(borrowed=True)
    borrowed.begin(1, *NODES)
    borrowed.run.asked_to_stop("control")
    assert borrowed.hear() == [StopWanted(Stop(StopReason.REQUEST))]


def test_a_node_that_stands_by_has_stopped(tmp_path: Path) -> None:
    """After a planned swap it warms up interpreters, and tells nobody of the swap any more."""
    settings = Settings(Program.find("executable", "true", ()), "r", "", "n1", 1, "r")
    folders = RunFolders.create("r", folder=tmp_path / "run", logs=None, shared=tmp_path / "shm")
    loop, console = Loop(), Console()
    supervisor = Supervisor(
        settings,
        folders,
        EventLog("r", "n1", []),
        loop,
        starter=RankStarter(settings, folders, loop, console),
        hangs=None,
        console=console,
    )
    supervisor.stop("the swap of n1")
    supervisor.stand_by(2)
    assert (supervisor.stopping, supervisor.state) == ("", "spare")


def test_nobody_leaves_its_ranks_to_themselves(follower: FollowerLauncher) -> None:
    """The signal came between two generations, and the leader began the next before it knew: now it stops the ranks."""
    follower.prepare(2, *NODES)
    follower.run.asked_to_stop("SIGTERM")
    follower.begin(2, *NODES)
    follower.run.received("n1", CODEC.encode(StopOrdered(2, SIGTERM)))
    follower.loop.advance(121)
    assert (follower.node.stopping, follower.node.left) == ("SIGTERM", None)


@pytest.mark.parametrize(("signals", "limit_s"), [(2, SECOND_STOP_S), (3, 0.0)])
def test_more_signals_hasten_a_launcher_whose_ranks_are_gone(
    follower: FollowerLauncher, signals: int, limit_s: float
) -> None:
    """There is no leader that could end the run, nor a folder in which one could be found."""
    follower.elect(None)
    follower.run.cut_off()
    for _ in range(signals):
        follower.run.asked_to_stop("SIGTERM")
    assert follower.node.left is None
    follower.loop.advance(limit_s)
    assert follower.node.left == (exitcodes.REQUEUE, "stopped after SIGTERM")


def test_a_launcher_that_never_met_the_others_stops_soon() -> None:
    """Nobody has to be told, and no rank saves anything: Ctrl-C before a run has begun takes seconds."""
    follower = FollowerLauncher()
    follower.group.leader = None
    follower.run.asked_to_stop("SIGTERM")
    follower.loop.advance(UNBEGUN_S)
    assert follower.node.left == (exitcodes.REQUEUE, "stopped after SIGTERM")
