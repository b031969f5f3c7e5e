"""A launcher with peers: outages, new leaders, and how it stops."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opsd import exitcodes
from opsd.launch.claims.messages import Begun
from opsd.launch.io.console import Console
from opsd.launch.io.handshake import host_is_up
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import EventLog, flush
from opsd.launch.ranks.settings import Program, Settings
from opsd.launch.ranks.shutdown import SECOND_STOP_S
from opsd.launch.ranks.workers import RankStarter
from opsd.launch.run.announcer import summarize_job
from opsd.launch.run.assembly import EnclosingJob
from opsd.launch.run.cluster import LASTING_S, SILENT_S, UNBEGUN_S
from opsd.launch.run.messages import (
    CODEC,
    Ended,
    Failed,
    GivenBack,
    Leaving,
    Readiness,
    Stop,
    StopOrdered,
    StopReason,
    StopWanted,
    Waiting,
)
from opsd.launch.run.shutdown import CLAIM_S, Shutdown
from opsd.launch.run.supervisor import Supervisor
from opsd.rundir import RunFolders
from opsd.slurm.port import JobDetails, Node, SlurmUnavailable
from tests.fakes.cluster import FollowerLauncher
from tests.fakes.leader import NODES, SIGTERM, swap_of
from tests.fakes.requeue import FakeQueue, running

# What a launcher with peers makes of outages, of a new leader, and of a folder that fails.


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


# How a launcher with peers stops: signals to its node, planned swaps, and borrowed nodes that leave.


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


# The exit of the leader: who ends the job of the run.


class Job:
    """A batch job whose host dies, or does not, before the launcher exits: ``orphaned`` has the next answers."""

    def __init__(self, *orphaned: bool) -> None:
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        self._orphaned = list(orphaned)

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> bool:
        """See ``BatchJob.end``."""
        self.asked.append((code, lost))
        return self._orphaned.pop(0)


class ShutdownLoop:
    """Does all at once."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Nothing comes later."""

    def run_in_thread(self, work: Callable[[], bool], done: Callable[[bool], None]) -> None:
        """Here and now."""
        done(work())


@pytest.mark.parametrize(("orphaned", "asks"), [((False, False), 2), ((False, True), 2), ((True,), 1)])
def test_the_batch_host_is_looked_at_again_at_the_very_end(orphaned: tuple[bool, ...], asks: int) -> None:
    """It may die while the report is made. A job that was ended is not ended again."""
    job, finished = Job(*orphaned), list[tuple[int, str]]()
    node = SimpleNamespace(loop=ShutdownLoop(), finish=lambda code, reason: finished.append((code, reason)))
    shutdown = Shutdown(cast(Any, node), cast(Any, SimpleNamespace(alive={})), job, lambda: None)
    shutdown.over(0, "all ranks finished", ("n2",), ())
    shutdown.leave(0, "all ranks finished")
    assert finished == [(0, "all ranks finished")]
    shutdown.last_look()
    assert job.asked == [(0, ("n2",))] * asks


def test_a_launcher_that_does_not_lead_asks_for_nothing() -> None:
    """The job's end is the leader's."""
    job, finished = Job(), list[int]()
    node = SimpleNamespace(loop=ShutdownLoop(), finish=lambda code, reason: finished.append(code))
    shutdown = Shutdown(cast(Any, node), cast(Any, SimpleNamespace(alive={})), job, lambda: None)
    shutdown.leave(0, "all ranks finished")
    shutdown.last_look()
    assert (finished, job.asked) == ([0], [])


# What the leader does with the Slurm job at the end of a run.


ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("lost", "calls"), [(("n2", "n9"), ["drain n2", "down n2", "requeue"]), (("n9",), []), ((), [])]
)
def test_a_spare_that_left_is_no_loss_of_the_job(tmp_path: Path, lost: tuple[str, ...], calls: list[str]) -> None:
    """It never was one of its nodes: the requeue is without the others, and the batch script's if there are none."""
    slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2", "n9")], running("n1", "n2"), dead=lost)
    EnclosingJob(ENVIRON, tmp_path / "log", lambda: slurm).end(exitcodes.REQUEUE, lost, ())
    assert slurm.calls == calls


def test_a_controller_that_is_away_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """The launcher says so, and nothing outside of a job; else the summary is in the comment of the job."""
    slurm = FakeQueue([], running("n1", "n2"))
    summarize_job("finished", lambda: slurm, ENVIRON)
    slurm.error = SlurmUnavailable("the controller does not answer")
    summarize_job("failed", lambda: slurm, ENVIRON)
    summarize_job("finished", lambda: slurm, {})
    assert slurm.summaries == {7: "finished"}
    assert capfd.readouterr().err == (
        "opsd: the job's comment has no summary of the run: the controller does not answer\n"
    )


@pytest.mark.parametrize(
    ("code", "refuses", "calls"),
    [
        (exitcodes.OK, "", ["complete 0"]),
        (exitcodes.REPEATED, "", ["complete 70"]),
        (exitcodes.OK, "complete", ["cancel 7"]),
    ],
)
def test_a_run_ends_its_job_with_its_own_code(tmp_path: Path, code: int, refuses: str, calls: list[str]) -> None:
    """The batch host is dead. A cancel breaks each chain of afterok, so it is the last resort."""
    slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2")], running("n1", "n2"), refuses=refuses)
    EnclosingJob(ENVIRON, tmp_path / "log", lambda: slurm).end(code, ("n1",), ())
    assert slurm.calls == calls


def test_a_job_that_slurm_may_not_requeue_ends_with_75(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No helper is submitted; nothing else would end the job, whose batch script is dead."""
    slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2")], running("n1", "n2"), room=True)
    slurm.by_details[7] = JobDetails({}, requeues=False)
    EnclosingJob(ENVIRON, tmp_path / "log", lambda: slurm).end(exitcodes.REQUEUE, ("n1",), ())
    assert (slurm.calls, slurm.submitted) == (["complete 75"], [])
    flush()
    assert "job 7 has --no-requeue" in capfd.readouterr().err


@pytest.mark.parametrize(("is_up", "calls"), [(True, []), (False, ["complete 0"])])
def test_a_batch_host_that_died_before_it_joined_is_no_loss_that_the_run_knows(
    tmp_path: Path, is_up: bool, calls: list[str]
) -> None:
    """It is asked whether it still lives: nobody else would end the job."""
    slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2")], running("n1", "n2"))
    environ = {**ENVIRON, "OPSD_BATCH_HOST": "n1"}
    asked = []

    def answers(host: str, ports: Sequence[int]) -> bool:
        asked.append((host, *ports))
        return is_up

    EnclosingJob(environ, tmp_path / "log", lambda: slurm, answers).end(exitcodes.OK, (), ())
    assert (slurm.calls, asked) == (calls, [("n1", 7003, 22)])


def test_a_host_that_refuses_is_up() -> None:
    """One that does not answer is not, and one without an address is unknown."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = server.getsockname()[1]
        assert host_is_up("127.0.0.1", (port,))
        for _ in range(4):  # a queue that is full takes no more
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert not host_is_up("127.0.0.1", (port,), timeout_s=0.2)
    assert host_is_up("127.0.0.1", (port,))
    assert host_is_up("nobody.invalid", (port,))
