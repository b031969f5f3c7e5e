"""What a launcher with fellows makes of outages, of a new head, and of signals to its own node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.launch.io.console import Console
from opsd.launch.io.events import EventLog
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.program import Program
from opsd.launch.ranks.rundir import RunFolders
from opsd.launch.ranks.settings import Settings
from opsd.launch.run.cluster import UNBEGUN_S
from opsd.launch.run.supervisor import Supervisor
from tests.fakes.cluster import Fellow
from tests.fakes.head import NODES


@pytest.fixture
def fellow() -> Fellow:
    """One of three that train."""
    fellow = Fellow()
    fellow.begin(1, *NODES)
    return fellow


def test_an_outage_is_no_end_of_the_run(fellow: Fellow) -> None:
    """Who was cut off has killed its ranks: the next head hears since when they do not run, not that they are done."""
    fellow.elect(None)
    fellow.run.isolated()
    assert fellow.node.state == "waiting"
    time.sleep(0.02)
    fellow.elect("n3")
    assert fellow.told[-1]["kind"] == "waiting"
    assert fellow.told[-1]["gone_s"] >= 0.02


def test_a_node_that_is_done_stays_so(fellow: Fellow) -> None:
    """Whoever becomes head hears it, also after an outage."""
    fellow.finish_ranks()
    fellow.elect(None)
    fellow.run.isolated()
    fellow.elect("n3")
    assert fellow.kinds() == ["ended", "ended"]


def test_ranks_that_failed_under_a_head_that_died_are_not_done(fellow: Fellow) -> None:
    """Only that one had heard of the failure."""
    fellow.node.generation.running = []
    fellow.elect("n3")
    assert fellow.kinds() == ["waiting"]


def test_who_was_cut_off_gives_up_only_while_there_is_no_head(fellow: Fellow) -> None:
    """A head that came back and is replaced a minute later is no reason to leave."""
    fellow.elect(None)
    fellow.run.isolated()
    fellow.loop.advance(5)
    fellow.elect("n1")
    fellow.begin(2, *NODES)
    fellow.loop.advance(54)
    fellow.elect(None)
    fellow.loop.advance(30)
    assert (fellow.node.left, fellow.node.state) == (None, "running")
    fellow.run.isolated()
    fellow.loop.advance(60)
    assert fellow.node.left is not None
    assert fellow.node.left[0] == exitcodes.REQUEUE


def test_a_signal_during_a_swap_is_told_as_what_it_is(fellow: Fellow) -> None:
    """To the next head too: it would take it for the swap, and go on."""
    fellow.run.received("n1", {"kind": "order_stop", "by": "the swap of n3"})
    fellow.run.asked_to_stop("SIGTERM")
    fellow.elect("n3")
    assert [message["by"] for message in fellow.told if message["kind"] == "stop"] == ["SIGTERM", "SIGTERM"]


def test_a_guest_that_stands_by_goes_alone() -> None:
    """The end of its own job is not the run's, whether it has joined already or not."""
    fellow, new = Fellow(guest=True), Fellow(guest=True)
    fellow.begin(1, "n1", "n3", spares=("n2",))
    for guest in (fellow, new):
        guest.run.asked_to_stop("SIGTERM")
        assert guest.node.left == (exitcodes.INTERRUPTED, "n2 goes: its own job ends (SIGTERM)")
    assert fellow.kinds() + new.kinds() == ["readiness"]


def test_a_guest_at_work_goes_once_it_is_replaced() -> None:
    """It asks again whenever that may have become possible: a spare has come, or another head."""
    guest = Fellow(guest=True)
    guest.begin(1, *NODES)
    guest.run.asked_to_stop("SIGUSR1")
    guest.begin(2, *NODES, spares=("n4",), keep=1)
    guest.elect("n3")
    assert guest.kinds() == ["leaving"] * 3
    assert (guest.node.left, guest.node.stopping) == (None, "")
    guest.begin(3, "n1", "n4", "n3", spares=("n2",))
    assert guest.node.left is not None
    assert guest.node.left[0] == exitcodes.INTERRUPTED


def test_the_run_can_be_stopped_on_a_guest_too() -> None:
    """By its control socket: that is about the run."""
    guest = Fellow(guest=True)
    guest.begin(1, *NODES)
    guest.run.asked_to_stop("control")
    assert guest.kinds() == ["stop"]


def test_a_node_that_stands_by_has_stopped(tmp_path: Path) -> None:
    """After a planned swap it warms up interpreters, and tells nobody of the swap any more."""
    settings = Settings(Program.find("executable", "true", ()), "r", "", "n1", 1, "r")
    folders = RunFolders.create("r", folder=tmp_path / "run", logs=None, shared=tmp_path / "shm")
    supervisor = Supervisor(
        settings,
        folders,
        EventLog("r", "n1", []),
        Loop(),
        starter=None,  # type: ignore[arg-type]
        standby=None,  # type: ignore[arg-type]
        hangs=None,
        console=Console(),
    )
    supervisor.stop("the swap of n1")
    supervisor.stand_by(2)
    assert (supervisor.stopping, supervisor.state) == ("", "spare")


def test_a_launcher_that_never_met_the_others_stops_soon() -> None:
    """Nobody has to be told, and no rank saves anything: Ctrl-C before a run has begun takes seconds."""
    fellow = Fellow()
    fellow.elect(None)
    fellow.run.asked_to_stop("SIGTERM")
    fellow.loop.advance(UNBEGUN_S)
    assert fellow.node.left == (exitcodes.REQUEUE, "stopped after SIGTERM")
