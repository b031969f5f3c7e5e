"""Requeueing a job: without its lost nodes, once, and started at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.commands.main import cli
from opsd.slurm.port import Node, SlurmDenied, SlurmRejected, SlurmUnavailable
from opsd.slurm.requeue import LIMIT_S, UNFIT_S, ExcludedNodes, Requeued, next_step, preview, requeue_now, whose_hold
from tests.fakes.clock import FakeClock
from tests.fakes.requeue import FakeQueue, queue, running

ANYWHERE = ExcludedNodes()


def ask(
    slurm: FakeQueue,
    without: ExcludedNodes = ANYWHERE,
    *,
    each_pause: Callable[[], object] = lambda: None,
    clock: FakeClock | None = None,
    **more: Any,
) -> tuple[Requeued, list[str]]:
    """The outcome of a requeue of job 7, and what was said on the way."""
    clock, said = clock or FakeClock(), list[str]()

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        each_pause()

    done = requeue_now(
        slurm, 7, without, clock=clock.monotonic, now=clock.wall, sleep=sleep, say=said.append, **more
    )  # fmt: skip
    return done, said


def test_an_operator_takes_the_dead_node_down() -> None:
    """Drain and down first, so that Slurm does not wait for its word; the start time once the job is pending."""
    slurm = queue(dead=("n2",))
    done, _ = ask(slurm, ExcludedNodes(lost=("n2",), reason="opsd:42 node_lost"))
    assert slurm.calls == ["drain n2", "down n2", "requeue", "start"]
    assert slurm.by_name["n2"].reason == "opsd:42 node_lost"
    assert done == Requeued(7, "pending", 1)


def test_an_owner_shrinks_the_job_and_avoids_the_dead_node() -> None:
    """Slurm does not know yet that the node is dead: the job must neither wait for it nor come back on it."""
    slurm = queue(dead=("n2",), operator=False)
    done, _ = ask(slurm, ExcludedNodes(lost=("n2",)))
    assert slurm.calls == ["shrink to n1 n3", "requeue", "exclude n2", "start"]
    assert done == Requeued(7, "pending", 1, ("n2",))


def test_an_owner_waits_for_slurm_if_the_batch_host_is_dead() -> None:
    """A job cannot be shrunk by its batch host: the start is at once all the same when Slurm has noticed."""
    slurm = queue(dead=("n1",), operator=False)
    pauses = iter(range(1000))

    def notice() -> None:
        if next(pauses) == 500:
            slurm.by_name["n1"] = Node("n1", "down", frozenset({"not_responding"}), "Not responding")

    done, _ = ask(slurm, ExcludedNodes(lost=("n1",)), each_pause=notice)
    assert slurm.calls == ["requeue", "start"]
    assert done.state == "pending"


def test_a_living_node_is_avoided_and_not_drained() -> None:
    """Whether a bad node goes out of service is for the agent to decide, within the share that it may drain."""
    slurm = queue()
    done, _ = ask(slurm, ExcludedNodes(unfit=("n3",)))
    assert slurm.calls == ["requeue", "exclude n3", "start"]
    assert done.avoided == ("n3",)


def test_a_node_that_was_lost_earlier_is_given_back() -> None:
    """Slurm knows by itself how it is when its timeout is over; before that its word may be older than the loss."""
    slurm, clock = queue(operator=False), FakeClock()
    slurm.excluded_at = {"n3": clock.wall() - 401.0, "n4": clock.wall() - 60.0}
    done, _ = ask(slurm, ExcludedNodes(unfit=("n2",)), clock=clock)
    assert slurm.calls == ["requeue", "include n3", "exclude n2", "start"]
    assert (slurm.excluded_at.keys(), done.avoided) == ({"n2", "n4"}, ("n2",))


def test_a_node_that_slurm_has_taken_out_is_not_avoided_as_well() -> None:
    """It gets no job before it is back, and then this one may have it."""
    slurm, clock = queue(operator=False), FakeClock()
    slurm.excluded_at = {"n4": clock.wall() - 60.0}
    slurm.by_name["n4"] = Node("n4", "down", frozenset({"not_responding"}), "Not responding")
    ask(slurm, clock=clock)
    assert slurm.calls == ["requeue", "include n4", "start"]


def test_a_node_that_is_lost_again_stays_avoided() -> None:
    """However long ago it was lost for the first time."""
    slurm, clock = queue(operator=False), FakeClock()
    slurm.excluded_at = {"n3": clock.wall() - 9000.0}
    ask(slurm, ExcludedNodes(unfit=("n3",)), clock=clock)
    assert slurm.calls == ["requeue", "exclude n3", "start"]


def test_a_job_that_cannot_do_without_an_unfit_node_waits_until_that_is_taken_out() -> None:
    """It would fail there again. Once the node is drained, the job waits for its return, or for any other one."""
    slurm, clock = queue(needs_all=True), FakeClock()
    began = clock.monotonic()

    def drain() -> None:
        if clock.monotonic() > began + 1200.0:
            slurm.by_name["n3"] = Node("n3", "idle", frozenset({"drain"}), "opsd:7 gpu_lost", "opsd")

    done, said = ask(slurm, ExcludedNodes(unfit=("n3",)), clock=clock, each_pause=drain)
    assert slurm.calls == ["requeue", "exclude n3", "start", "include n3", "release", "start"]
    assert done == Requeued(7, "pending", 1)
    assert clock.monotonic() - began < 1300.0
    assert any("cannot run without n3" in sentence for sentence in said)


def test_a_job_that_cannot_do_without_an_unfit_node_is_not_held_for_ever() -> None:
    """If nobody takes the node out, it is tried again: what fails there once more ends the run with its reason."""
    slurm, clock = queue(needs_all=True), FakeClock()
    began = clock.monotonic()
    ask(slurm, ExcludedNodes(unfit=("n3",)), clock=clock)
    assert slurm.calls == ["requeue", "exclude n3", "start", "include n3", "release", "start"]
    assert UNFIT_S < clock.monotonic() - began < UNFIT_S + LIMIT_S


def test_the_next_requeue_does_not_lift_what_keeps_a_job_off_an_unfit_node() -> None:
    """Ten minutes later Slurm knows no more of its GPU, unless the node was taken out of service."""
    slurm, clock = queue(), FakeClock()
    ask(slurm, ExcludedNodes(unfit=("n3",)), clock=clock)
    clock.advance(600.0)
    slurm.job = replace(slurm.job, state="running", nodes=("n1", "n2", "n4"))
    ask(slurm, clock=clock)
    assert slurm.excluded_at.keys() == {"n3"}


def test_a_job_that_cannot_do_without_a_dead_node_waits_until_slurm_knows() -> None:
    """It would start on the dead node at once. When Slurm has taken that out it waits for it or for any other one.

    However long Slurm takes for that.
    """
    slurm, clock = queue(needs_all=True, operator=False), FakeClock()
    began = clock.monotonic()

    def notice() -> None:
        assert slurm.calls[-1] != "include n3" or clock.monotonic() >= began + 200.0
        if clock.monotonic() > began + 200.0:
            slurm.by_name["n3"] = Node("n3", "down", frozenset({"not_responding"}), "Not responding")

    done, said = ask(slurm, ExcludedNodes(lost=("n3",)), clock=clock, each_pause=notice, limit_s=100.0)
    assert slurm.calls[2:] == ["exclude n3", "start", "include n3", "release", "start"]
    assert (done, slurm.excluded_at) == (Requeued(7, "pending", 1), {})
    assert sum("cannot run without n3: it waits" in sentence for sentence in said) == 1


def test_a_node_that_is_in_service_long_after_its_loss_has_come_back() -> None:
    """Slurm would have noticed that it is dead."""
    slurm, clock = queue(needs_all=True, operator=False), FakeClock()
    began = clock.monotonic()
    ask(slurm, ExcludedNodes(lost=("n3",)), clock=clock)
    assert slurm.calls[-3:] == ["include n3", "release", "start"]
    assert clock.monotonic() - began > 400.0


def test_asked_again_a_job_that_is_held_for_its_nodes_is_tried_again() -> None:
    """The helper that attended to it has gone."""
    slurm, clock = queue(needs_all=True, operator=False), FakeClock()
    slurm.job = replace(slurm.job, state="pending", reason="BadConstraints", nodes=())
    slurm.excluded_at = {"n3": clock.wall() - 9000.0}
    ask(slurm, clock=clock)
    assert slurm.calls == ["include n3", "release", "start"]


def test_a_node_that_others_hold_is_left_alone() -> None:
    """What a person has drained is not set down; the job is requeued nevertheless."""
    slurm = queue()
    slurm.by_name["n2"] = Node("n2", "allocated", frozenset({"drain"}), "replacing a fan", "bob")
    _, said = ask(slurm, ExcludedNodes(lost=("n2",)))
    assert slurm.calls == ["requeue", "start"]
    assert any("replacing a fan" in sentence for sentence in said)


def test_a_job_that_was_requeued_meanwhile_is_left_alone() -> None:
    """The count of restarts tells that somebody else has done it."""
    slurm = queue(restarts=1)
    done, _ = ask(slurm, restarts=0)
    assert slurm.calls == []
    assert done == Requeued(7, "running", 1)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("pending", "JobHeldUser"),
        ("pending", "JobHeldAdmin"),
        ("pending", "JobHoldMaxRequeue"),
        ("pending", "job requeued in held state"),
        ("requeue_hold", "job_requeued_in_held_state"),
        ("special_exit", ""),
    ],
)
def test_a_hold_stays(state: str, reason: str) -> None:
    """Nothing is changed: not even the start time, which may be the user's."""
    slurm = queue(restarts=3)
    slurm.job = replace(slurm.job, state=state, reason=reason, nodes=())
    slurm.excluded_at = {"n3": 0.0}
    done, _ = ask(slurm, ExcludedNodes(unfit=("n2",)), restarts=2)
    assert (done.held, slurm.calls) == (reason or state, [])
    would = preview(slurm, 7, ANYWHERE, "alice")
    assert (would.possible, would.text) == (False, f"job 7 is on hold ({reason or state}): would leave it so")


@pytest.mark.parametrize("reason", ["launch failed requeued held", "launch_failed_requeued_held"])
def test_slurms_own_hold_after_a_failed_start_is_released_once(reason: str) -> None:
    """Nobody has asked for it. A second one in the same requeue stays."""
    slurm = queue(restarts=3)
    slurm.job = replace(slurm.job, state="pending", reason=reason, nodes=())
    done, _ = ask(slurm, restarts=2)
    assert (done.held, slurm.calls) == ("", ["release", "start"])
    slurm = queue(restarts=3)
    slurm.job = replace(slurm.job, state="pending", reason=reason, nodes=())

    def fail_again() -> None:
        slurm.job = replace(slurm.job, state="pending", reason=reason, nodes=())

    done, _ = ask(slurm, restarts=2, each_pause=fail_again)
    assert (done.held, slurm.calls) == (reason, ["release"])


def test_the_lead_is_left_to_another() -> None:
    """The attending job requeues by itself only if nobody else has done so in time."""
    slurm, seen = queue(), list[int]()
    ask(slurm, defer_s=5.0, each_pause=lambda: seen.append(len(slurm.calls)))
    assert seen.count(0) >= 49
    assert slurm.calls == ["requeue", "start"]


@given(outages=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=5), operator=st.booleans())
def test_it_is_done_once_whenever_the_controller_is_away(outages: list[tuple[int, int]], operator: bool) -> None:
    """Whichever requests go unanswered, the job is requeued one time, without its dead node, and may start."""
    away = {start + step for start, length in outages for step in range(length)}
    slurm = queue(dead=("n2",), operator=operator, away=away)
    done, _ = ask(slurm, ExcludedNodes(lost=("n2",)))
    assert done.restarts == 1
    assert slurm.calls.count("requeue") == 1
    assert slurm.calls[-1] == "start"
    assert ("down n2" in slurm.calls) == operator
    assert ("exclude n2" in slurm.calls) != operator


def test_it_gives_up_with_a_sentence() -> None:
    """A controller that stays away does not hold anybody for ever."""
    slurm = queue()
    slurm.error = SlurmUnavailable("the controller is away")
    with pytest.raises(SlurmUnavailable, match="job 7 is not back in the queue after 30 s"):
        ask(slurm, limit_s=30.0)


def test_a_job_of_somebody_else_is_refused() -> None:
    """Slurm's no is passed on, and nothing was touched before it."""
    slurm = queue(operator=False, owner=False)
    with pytest.raises(SlurmDenied, match="owner of the job"):
        ask(slurm, ExcludedNodes(lost=("n2",)))
    assert slurm.calls == []


def test_a_node_of_another_job_is_refused() -> None:
    """A wrong job id must not take down a node that the job has nothing to do with."""
    slurm = queue()
    with pytest.raises(SlurmRejected, match="job 7 does not run on n4; nothing was done"):
        ask(slurm, ExcludedNodes(lost=("n4",)))
    assert slurm.calls == []


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "timeout", "node_fail"])
def test_a_job_that_has_ended_is_refused(state: str) -> None:
    """It needs a new submission, and says so."""
    with pytest.raises(SlurmRejected, match=rf"job 7 has ended \({state}\).*submit it again"):
        next_step(replace(running("n1"), state=state), 0)


def test_what_nobody_is_left_of_is_requeued_at_once() -> None:
    """The helper does not wait for its delay; and the dead node is down before Slurm asks it to stop."""
    slurm, pauses = queue(dead=("n1",)), list[int]()

    def all_leave() -> None:
        pauses.append(len(slurm.calls))
        slurm.with_steps = {"n1"}

    ask(slurm, ExcludedNodes(lost=("n1",)), defer_s=30.0, each_pause=all_leave)
    assert pauses.count(0) == 1
    assert slurm.calls == ["drain n1", "down n1", "requeue", "start"]


def test_a_job_does_not_start_in_the_second_in_which_it_was_stopped() -> None:
    """Its nodes would take that for a start of the old one, and Slurm would give it up."""
    slurm, pauses = queue(), list[str]()
    ask(slurm, each_pause=lambda: pauses.append(slurm.calls[-1]))
    assert pauses.count("requeue") > 20


def test_a_job_that_another_process_starts_first_is_done() -> None:
    """Two processes ask for the same requeue. The second finds that the job is no longer pending."""

    class Overtaken(FakeQueue):
        def set_start_time(self, job: int, at: float | None = None) -> None:
            self.job = replace(self.job, state="running")
            super().set_start_time(job, at)

    nodes = [*queue().by_name.values()]
    done, _ = ask(Overtaken(nodes, running(*(node.name for node in nodes))))
    assert (done.state, done.restarts) == ("running", 1)


def test_a_node_of_another_job_stays_up_though_nobody_is_left() -> None:
    """A job whose steps have not begun yet has lost no node."""
    slurm = queue()
    slurm.with_steps = set()
    with pytest.raises(SlurmRejected, match="job 7 does not run on n4"):
        ask(slurm, ExcludedNodes(lost=("n4",)))
    assert slurm.calls == []


@pytest.mark.parametrize(
    ("operator", "lost", "user", "possible", "text"),
    [
        (True, ("n2",), "bob", True, "would take n2 down, requeue job 7 and have it start at once"),
        (False, ("n2",), "alice", True, "would shrink the job to its other nodes, since taking n2 down needs root"),
        (False, ("n1",), "alice", True, "wait until Slurm notices that n1, the node of the batch script, is dead"),
        (False, (), "bob", False, "job 7 is alice's: bob may not requeue it, that needs root"),
    ],
)
def test_a_dry_run_says_what_a_requeue_takes(
    operator: bool, lost: tuple[str, ...], user: str, possible: bool, text: str
) -> None:
    """Nothing is changed."""
    slurm = queue(operator=operator)
    would = preview(slurm, 7, ExcludedNodes(lost), user)
    assert (would.possible, text in would.text) == (possible, True), would.text
    assert slurm.calls == []


@pytest.mark.parametrize("job", ["12_3", "1_[1-4]", "1_000", "x", "0", "-4", ""])
def test_only_the_number_of_a_job_is_taken_for_one(job: str) -> None:
    """12_3 is a task of an array to Slurm and 123 to Python: another job, perhaps of the same user."""
    done = CliRunner().invoke(cli, ["requeue", "--dry-run", "--", job])
    assert (done.exit_code, "Error: Invalid value for '[JOB]'" in done.output) == (exitcodes.USAGE, True), done.output


@pytest.mark.parametrize(
    ("reason", "whose"),
    [
        ("launch failed requeued held", "Slurm has set, because the start"),
        ("launch_failed_requeued_held", "Slurm has set, because the start"),
        ("JobHoldMaxRequeue", "Slurm has set, because the job was requeued too often"),
        ("job requeued in held state", "somebody has set (scontrol requeuehold)"),
        ("requeue_hold", "somebody has set (scontrol requeuehold)"),
        ("JobHeldAdmin", "an administrator has set"),
        ("JobHeldUser", "somebody has set"),
    ],
)
def test_a_hold_is_told_as_whose_it_is(reason: str, whose: str) -> None:
    """As squeue of 22.05 to 26.05 words it."""
    assert whose_hold(reason).startswith(whose)
