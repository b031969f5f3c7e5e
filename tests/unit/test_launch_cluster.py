"""What a launcher with peers makes of outages, of a new leader, and of a folder that fails."""

from __future__ import annotations

import errno
import os
import time

import pytest

from opsd import exitcodes
from opsd.launch.claims.messages import Begun
from opsd.launch.io.reporting import flush
from opsd.launch.run.cluster import LASTING_S, SILENT_S
from opsd.launch.run.messages import (
    Ended,
    Failed,
    GivenBack,
    StopWanted,
    Waiting,
)
from opsd.launch.run.shutdown import CLAIM_S
from tests.fakes.cluster import FollowerLauncher
from tests.fakes.leader import NODES, SIGTERM


def test_ranks_run_on_without_a_leader(follower: FollowerLauncher) -> None:
    """Nobody has claimed another generation: an outage among launchers costs the run nothing."""
    follower.elect(None)
    follower.loop.advance(30)
    follower.elect("n1")
    assert (follower.node.state, follower.node.left, follower.hear()) == ("running", None, [])


def test_an_outage_is_no_end_of_the_run(follower: FollowerLauncher) -> None:
    """After a cut its ranks are killed: the next leader hears for how long they have not run, not that they ended."""
    follower.elect(None)
    follower.run.cut_off()
    assert follower.node.state == "waiting"
    time.sleep(0.02)
    follower.elect("n3")
    (told,) = follower.hear()
    assert isinstance(told, Waiting)
    assert told.generation == 1 and told.gone_s >= 0.02


@pytest.mark.parametrize(("theirs", "said"), [("2", 1), ("3", 0), (None, 0)])
def test_launchers_of_different_options_are_told(
    follower: FollowerLauncher, capfd: pytest.CaptureFixture[str], theirs: str | None, said: int
) -> None:
    """Once for each leader: without a word the run has another size than somebody wanted."""
    for number in (3, 4):
        follower.begin(number, "n1", "n2", nnodes=theirs)
    flush()
    text = capfd.readouterr().err
    assert text.count("this launcher was started with --nnodes 3, and that on n1 with --nnodes 2") == said


def test_ranks_that_are_being_ended_are_gone(follower: FollowerLauncher) -> None:
    """The outage is over before they are: nobody would say so later."""
    follower.node.slow = True
    follower.elect(None)
    follower.run.cut_off()
    follower.elect("n3")
    (told,) = follower.hear()
    assert isinstance(told, Waiting)


def test_a_node_that_is_done_stays_so(follower: FollowerLauncher) -> None:
    """A new leader is told, also after an outage."""
    follower.finish_ranks()
    follower.elect(None)
    follower.run.cut_off()
    follower.elect("n3")
    assert follower.hear() == [Ended(1), Ended(1)]


def test_ranks_that_failed_under_a_leader_that_died_are_not_done(follower: FollowerLauncher) -> None:
    """Only that one had heard of the failure."""
    follower.node.generation.running = []
    follower.elect("n3")
    assert follower.hear() == [Waiting(1, 0.0)]


@pytest.mark.parametrize("meanwhile", ["stop_too_slow", "cut_off"])
def test_nothing_keeps_a_node_from_being_ready(follower: FollowerLauncher, meanwhile: str) -> None:
    """Its ranks take seconds to end: nobody waits for them any longer, or the network and the folder are gone."""
    follower.node.slow = True
    follower.prepare(2, *NODES)
    call = getattr(follower.run, meanwhile)
    call(*(("rank 2 did not stop in time",) if meanwhile == "stop_too_slow" else ()))
    follower.node.collect()
    assert [number for number, _ in follower.group.answers] == [1, 2]


def test_ranks_that_are_being_ended_are_not_kept(follower: FollowerLauncher) -> None:
    """A claim came late that passed them over, at once one that keeps them: nobody else knows that they are gone."""
    follower.node.slow = True
    follower.prepare(2, *NODES)
    follower.prepare(3, *NODES, keep=1)
    assert [number for number, _ in follower.group.answers] == [1]
    follower.node.collect()
    follower.run.begin(follower.plan(3, *NODES, keep=1), Begun("10.0.0.1", 1))
    assert ([number for number, _ in follower.group.answers], follower.hear()) == ([1, 3], [Waiting(1, 0.0)])


def test_a_failure_is_told_to_the_next_leader(follower: FollowerLauncher) -> None:
    """One rank has failed, the other waits for it, for good: the leader that was told has died before it acted."""
    follower.fail("signal")
    (told,) = follower.hear()
    follower.elect(None)
    follower.elect("n3")
    (again,) = follower.hear()
    assert isinstance(told, Failed) and isinstance(again, Failed)
    assert [failed.failure.kind for failed in again.failures] == ["signal"]
    follower.begin(2, *NODES)
    follower.elect("n1")
    assert follower.hear() == []


def test_who_was_passed_over_ends_its_ranks(follower: FollowerLauncher) -> None:
    """Whatever of the claims in between it has not seen: a later one keeps the ranks of a generation without it."""
    follower.prepare(3, "n1", "n3", keep=2)
    assert (follower.node.generation.running, follower.group.answers[-1][0]) == ([], 3)


def test_ranks_that_a_claim_keeps_run_on(follower: FollowerLauncher) -> None:
    """Another launcher leads them, that is all."""
    follower.begin(2, *NODES, keep=1)
    assert follower.node.generation.running
    assert (follower.group.answers[-1][0], follower.hear()) == (2, [])


def test_who_gave_its_ranks_up_says_so_to_the_leader_that_keeps_them(follower: FollowerLauncher) -> None:
    """The leader cannot see it, and the others would wait for them."""
    follower.elect(None)
    follower.run.cut_off()
    follower.begin(2, *NODES, keep=1)
    assert follower.hear() == [Waiting(1, 0.0)]


def test_a_leader_that_keeps_the_ranks_hears_who_is_done(follower: FollowerLauncher) -> None:
    """It counts again which nodes have ended in good order; otherwise the run would never end."""
    follower.finish_ranks()
    follower.hear()
    follower.elect(None)
    follower.prepare(2, *NODES, keep=1)
    follower.elect("n3")
    assert follower.hear() == []
    follower.run.begin(follower.plan(2, *NODES, keep=1), Begun("10.0.0.1", 1))
    assert follower.hear() == [Ended(1)]


def test_a_leader_that_had_stepped_down_hears_what_it_knew(follower: FollowerLauncher) -> None:
    """It leads again from what it is told; this launcher may not have noticed, its leader is the same."""
    follower.run.asked_to_stop("SIGTERM")
    follower.finish_ranks()
    follower.hear()
    follower.begin(2, *NODES, keep=1)
    assert follower.hear() == [StopWanted(SIGTERM), Ended(1, SIGTERM)]


def test_a_process_that_missed_the_beginning_starts_no_ranks() -> None:
    """It was another one of its name that was ready: the leader has to begin the next generation."""
    follower = FollowerLauncher()
    follower.prepare(4, *NODES)
    follower.run.begin(follower.plan(4, *NODES), None)
    assert (follower.node.generation.running, follower.hear()) == ([], [Waiting(4, 0.0)])


def test_a_leader_whose_end_the_folder_does_not_take_ends_without(follower: FollowerLauncher) -> None:
    """And does with the job what there is to be done."""
    follower.elect("n2")
    follower.group.holds, follower.group.alive = True, {}
    follower.end_run(exitcodes.REQUEUE, "too few nodes are left", ("n3",), ())
    follower.loop.advance(CLAIM_S)
    follower.loop.settle()
    assert follower.job == [(exitcodes.REQUEUE, ("n3",))]
    assert follower.node.left == (exitcodes.REQUEUE, "too few nodes are left")


@pytest.mark.parametrize("leads_again", [False, True])
def test_an_end_that_nobody_made_is_forgotten(follower: FollowerLauncher, leads_again: bool) -> None:
    """The run went on, under another leader or the same again: a launcher that leaves later does not touch the job."""
    follower.elect("n2")
    follower.group.holds = True
    follower.end_run(exitcodes.REQUEUE, "too few nodes are left", ("n3",), ())
    follower.elect(None)
    follower.elect("n2" if leads_again else "n3")
    follower.loop.advance(CLAIM_S + 1)
    assert (follower.job, follower.node.left) == ([], None)
    follower.elect(None)
    follower.node.generation.running = []
    follower.loop.advance(60)
    assert (follower.job, follower.node.left) == ([], (exitcodes.REQUEUE, "no leader of the run within reach for 60 s"))


def test_another_copy_of_the_run_ends_this_one(follower: FollowerLauncher) -> None:
    """Its ranks would go on for nothing: no checkpoint of theirs could be committed any more."""
    follower.run.overtaken()
    assert follower.node.generation.running == []
    assert follower.node.left == (exitcodes.FENCED, "another copy of this run has begun in /runs/r; this one stops")


def test_a_folder_that_pauses_ends_nothing(follower: FollowerLauncher) -> None:
    """It delays a recovery; launchers that wait for a leader keep waiting."""
    follower.elect(None)
    follower.group.folder_silent_s = 59.0
    follower.loop.advance(61)
    assert (follower.node.left, follower.node.state) == (None, "running")
    follower.group.folder_silent_s = 0.0
    follower.loop.advance(120)
    assert follower.node.left is None, "ranks that go on are no reason to leave"
    follower.node.generation.running = []
    follower.loop.advance(60)
    assert follower.node.left == (exitcodes.REQUEUE, "no leader of the run within reach for 60 s")


@pytest.mark.parametrize(
    ("error", "silent_s", "ends"),
    [
        (errno.EROFS, LASTING_S + 1, True),
        (errno.EROFS, LASTING_S - 1, False),
        (errno.EIO, SILENT_S - 1, False),
        (errno.EIO, SILENT_S + 1, True),
    ],
)
def test_a_folder_that_can_never_be_used_again_ends_the_run(
    follower: FollowerLauncher, error: int, silent_s: float, ends: bool
) -> None:
    """A recovery, not ranks that go on; soon for what does not go away by itself, in half an hour whatever it is."""
    follower.group.folder_error, follower.group.folder_silent_s = OSError(error, os.strerror(error)), silent_s
    follower.loop.advance(2 * SILENT_S)
    assert follower.node.left is None, "training goes on"
    follower.prepare(2, *NODES)
    follower.loop.advance(silent_s)
    why = (exitcodes.FAILED, f"the run's folder cannot be used: {os.strerror(error)}")
    assert follower.node.left == (why if ends else None)


@pytest.mark.parametrize(
    ("error", "code"),
    [(errno.EROFS, exitcodes.FAILED), (errno.ENOSPC, exitcodes.NO_SPACE), (errno.EDQUOT, exitcodes.NO_SPACE)],
)
def test_a_run_does_not_begin_in_a_folder_that_cannot_be_used(error: int, code: int) -> None:
    """Said at once: a full disk used to hold the nodes for half an hour."""
    follower = FollowerLauncher()
    follower.group.leader = None
    follower.group.folder_error, follower.group.folder_silent_s = OSError(error, os.strerror(error)), 0.1
    follower.loop.advance(1)
    assert follower.node.left == (code, f"the run's folder cannot be used: {os.strerror(error)}")


def test_who_finds_nobody_leaves() -> None:
    """When the time to join is up and no leader has been found."""
    follower = FollowerLauncher()
    follower.group.leader = None
    follower.loop.advance(601)
    assert follower.node.left == (exitcodes.FAILED, "fewer launchers than the run needs have come within 600 s")


@pytest.mark.parametrize(("near", "enough"), [(("n2",), False), (("n1", "n2"), True), (("n2", "n9"), True)])
def test_who_is_enough(near: tuple[str, ...], enough: bool) -> None:
    """As many as the run needs, with those that the plan says are unfit left out."""
    follower = FollowerLauncher(least=2)
    follower.prepare(1, *NODES, unfit=("n3",))
    assert follower.run.enough(near) == enough
    assert not follower.run.enough(("n2", "n3"))


def test_a_node_that_was_found_unfit_says_when_it_was_given_back(follower: FollowerLauncher) -> None:
    """Once: it is given back while no launcher runs there."""
    follower.prepare(2, "n1", "n3", spares=("n2",), unfit=("n4",))
    for number in (3, 4):
        follower.prepare(number, "n1", "n3", spares=("n2",), unfit=("n2",))
    follower.loop.settle()
    assert [message for message in follower.hear() if isinstance(message, GivenBack)] == [GivenBack(1234.5)]


def test_who_was_cut_off_gives_up_only_while_there_is_no_leader(follower: FollowerLauncher) -> None:
    """A leader that came back and is replaced a minute later is no reason to leave."""
    follower.elect(None)
    follower.run.cut_off()
    follower.loop.advance(5)
    follower.elect("n1")
    follower.begin(2, *NODES)
    follower.loop.advance(54)
    follower.elect(None)
    follower.loop.advance(30)
    assert (follower.node.left, follower.node.state) == (None, "running")
    follower.run.cut_off()
    follower.loop.advance(60)
    assert follower.node.left is not None
    assert follower.node.left[0] == exitcodes.REQUEUE
