"""What the leader of a run makes of failures, hangs and requests; its peers and the time are simulated."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opsd import exitcodes
from opsd.launch.hangs.culprit import RankStatus
from opsd.launch.ranks.failure import COMPANION_REFUSED, RankError
from opsd.launch.run import messages
from opsd.launch.run.messages import RankStatusesWanted, StopOrdered
from tests.fakes.leader import NODES, SIGTERM, SPARE, LeaderHarness, swap_of


@pytest.fixture
def stage(tmp_path: Path) -> LeaderHarness:
    return LeaderHarness.at_work(tmp_path)


def test_the_first_cause_is_blamed(stage: LeaderHarness) -> None:
    """Ranks that lost their connection have failed too, earlier or later; the other one is the cause."""
    stage.fail("n1", 0, "communication")
    stage.loop.advance(0.05)
    stage.fail("n2", 3, "user", reports=True, error=RankError("ValueError", "boom", "train.py:7"))
    stage.loop.advance(0.2)
    assert stage.slots == [NODES, NODES]
    memory = stage.group.proposals[-1].payload["policy"]
    assert memory["user_errors"] == [[None, ["ValueError", "train.py:7", "boom"]]]


def test_victims_wait_for_the_loss_behind_them(stage: LeaderHarness) -> None:
    """Failures that only speak of lost connections are not judged before a lost node would have been noticed."""
    stage.fail("n1", 0, "communication")
    stage.loop.advance(2.0)
    assert len(stage.slots) == 1
    stage.lose("n3")
    assert stage.slots[1:] == [("n1", "n2", SPARE)]
    stage.loop.advance(5)
    assert len(stage.slots) == 2


def test_an_error_of_the_program_stops_the_run_at_the_second_time(stage: LeaderHarness) -> None:
    """Also if another launcher was leader at the first time."""
    error = RankError("ValueError", "boom", "train.py:7")
    stage.fail("n2", 3, "user", error=error, step=5)
    stage.loop.advance(1)
    stage.begin().succeed()
    stage.fail("n2", 3, "user", error=error, step=5)
    stage.loop.advance(1)
    ((code, reason),) = stage.over
    assert code == exitcodes.REPEATED
    assert "Rank 3 on n2 failed after step 5 with ValueError: boom" in reason


def test_a_planned_swap_loses_nothing(stage: LeaderHarness) -> None:
    """All ranks checkpoint and stop, then the spare takes the place, and the run goes on."""
    stage.swap("n3")
    assert stage.group.orders == [StopOrdered(1, swap_of("n3"))]
    stage.finish_ranks(*NODES, told=swap_of("n3"))
    assert stage.slots[-1] == ("n1", "n2", SPARE)
    assert not stage.over


def test_a_swap_outlives_its_leader(stage: LeaderHarness) -> None:
    """The next leader learns from the ranks' end that they were stopped for a swap, and sees to it."""
    stage.swap("n3")
    stage.succeed()
    stage.finish_ranks(*NODES, told=swap_of("n3"))
    assert (stage.slots[-1], stage.over) == (("n1", "n2", SPARE), [])
    assert [event["retired"] for event in stage.events("node_retired")] == ["n3", "n3"]
    assert [plan.payload["keep"] for plan in stage.group.proposals] == [0, 1, 0]


def test_a_leader_that_stepped_down_leads_on_from_what_it_is_told_again(stage: LeaderHarness) -> None:
    """The others may not have noticed: after its claim they report their state again. The ranks keep running."""
    stage.finish_ranks("n2")
    stage.leader = stage.new_leader()
    stage.leader.take_over()
    assert stage.group.proposals[-1].payload["keep"] == 1
    stage.begin().finish_ranks(*NODES)
    assert stage.over == [(exitcodes.OK, "all ranks finished")]


@pytest.mark.parametrize("another_leader", [False, True])
def test_a_swap_that_takes_too_long_ends_no_run(stage: LeaderHarness, another_leader: bool) -> None:
    """The next step boundary was too far away: the spare takes over from the last checkpoint."""
    stage.swap("n3")
    if another_leader:
        stage.succeed()
    for name in NODES:
        stage.tell(name, messages.Late(stage.generation, "rank 0 did not stop in time", swap_of("n3")))
    assert (stage.group.proposals[-1].payload["keep"], stage.group.proposals[-1].payload["restarts"]) == (0, 1)
    assert not stage.over
    assert another_leader or stage.slots[-1] == ("n1", "n2", SPARE)


def test_a_stop_that_takes_too_long_ends_the_run(stage: LeaderHarness) -> None:
    """Also if a swap was on its way: the newest checkpoint may be missing."""
    stage.swap("n3")
    stage.stop("n2")
    stage.tell("n1", messages.Late(stage.generation, "rank 0 did not stop in time", swap_of("n3")))
    assert stage.over == [(exitcodes.FAILED, "rank 0 did not stop in time")]


@pytest.mark.parametrize("proposed", [False, True])
def test_a_node_stays_if_its_spare_dies_before_the_swap(stage: LeaderHarness, proposed: bool) -> None:
    """While the ranks stop or afterwards: the run does not end for want of a node that is still there."""
    stage.swap("n3")
    if not proposed:
        stage.lose(SPARE)
    stage.finish_ranks(*NODES, told=swap_of("n3"))
    if proposed:
        stage.lose(SPARE)
    assert (stage.slots[-1], stage.over) == (NODES, [])
    assert stage.events("swap_refused")[0]["swap"] == "n3"


def test_ranks_that_were_gone_are_a_failure_of_their_own(stage: LeaderHarness) -> None:
    """Of the network as it seems: it began when they ended, and not when the leader came to hear of it."""
    before = time.time()
    for name in NODES:
        stage.tell(name, messages.Waiting(1, 30.0))
    assert stage.slots == [NODES, NODES]
    (gone,) = stage.events("ranks_gone")
    assert (gone["gone"], gone["gone_s"]) == ("n1", 30.0)
    assert before - 30 <= gone["t"] <= time.time() - 30


def test_ranks_that_were_gone_are_not_started_again_for_a_stop(stage: LeaderHarness) -> None:
    """The stop would be forgotten with the generation, and the run would go on."""
    stage.stop("n1")
    stage.tell("n2", messages.Waiting(stage.generation, 7.0))
    assert stage.over == [(exitcodes.REQUEUE, "the ranks of n2 were gone when the run was to stop")]
    assert stage.slots == [NODES]


def test_a_borrowed_node_that_has_to_leave_is_swapped(stage: LeaderHarness) -> None:
    """It is no fault of its node, which may come again."""
    stage.tell("n3", messages.Leaving(1, "its own job ends (SIGUSR1)"))
    assert stage.group.orders == [StopOrdered(1, swap_of("n3"))]
    stage.finish_ranks(*NODES, told=swap_of("n3"))
    assert stage.slots[-1] == ("n1", "n2", SPARE)
    stage.begin().lose("n3")
    assert not stage.events("node_retired")
    stage.join("n3")
    stage.lose("n2")
    assert stage.slots[-1] == ("n1", "n3", SPARE)


def test_a_spare_is_asked_for_in_the_place_of_a_borrowed_node(tmp_path: Path) -> None:
    """Until it has come the ranks run on."""
    stage = LeaderHarness.at_work(tmp_path, *NODES)
    stage.tell("n3", messages.Leaving(1, "its own job ends (SIGUSR1)"))
    (wanted,) = stage.events("spare_wanted")
    assert (wanted["swap"], wanted["reason"]) == ("n3", "its own job ends (SIGUSR1)")
    assert stage.group.orders == []


def test_a_borrowed_node_is_swapped_once_the_spare_that_was_asked_for_is_ready(tmp_path: Path) -> None:
    """Else it would stay until its job kills it, at the cost of the steps since the last checkpoint."""
    stage = LeaderHarness.at_work(tmp_path, *NODES)
    for _ in range(2):
        stage.tell("n3", messages.Leaving(1, "its own job ends (SIGTERM)"))
    stage.join(SPARE)
    stage.tell(SPARE, messages.Readiness("data: x was damaged"))
    assert (len(stage.events("spare_wanted")), stage.group.orders) == (1, [])
    stage.tell(SPARE, messages.Readiness(""))
    assert stage.group.orders == [StopOrdered(1, swap_of("n3"))]
    stage.finish_ranks(*NODES, told=swap_of("n3"))
    assert stage.slots[-1] == ("n1", "n2", SPARE)


def test_no_swap_without_a_spare(tmp_path: Path) -> None:
    """The run is not interrupted for nothing."""
    stage = LeaderHarness.at_work(tmp_path, *NODES)
    stage.swap("n2")
    assert (stage.slots, stage.group.orders) == ([NODES], [])
    assert stage.events("swap_refused")[0]["swap"] == "n2"


def test_a_stop_ends_in_a_requeue(stage: LeaderHarness) -> None:
    """Whichever node got the signal: all are told once, and the run ends when all have stopped."""
    stage.stop(*NODES)
    assert stage.group.orders == [StopOrdered(1, SIGTERM)]
    stage.finish_ranks("n1", "n2", told=SIGTERM)
    assert not stage.over
    stage.finish_ranks("n3", told=SIGTERM)
    assert stage.over == [(exitcodes.REQUEUE, "stopped in good order after SIGTERM")]


@pytest.mark.parametrize(
    ("furthest", "committed", "cut_off", "kept"),
    [
        (9, 9, False, "; the newest checkpoint is that of step 9"),
        (9, 8, False, "; the newest checkpoint is that of step 8, 1 step is done again"),
        (9, 5, True, "; the newest checkpoint is that of step 5, 4 steps are done again"),
        (9, None, False, "; no checkpoint was seen"),
        (None, None, True, ""),
    ],
)
def test_a_stop_says_what_is_kept(
    stage: LeaderHarness, furthest: int | None, committed: int | None, cut_off: bool, kept: str
) -> None:
    """The newest checkpoint and the steps after it, and whether the signal has ended ranks; one such node is enough."""
    stage.stop("n1")
    stage.tell("n2", messages.Progress(stage.generation, furthest, committed))
    stage.finish_ranks("n1", told=SIGTERM, cut_off=cut_off)
    stage.finish_ranks("n2", "n3", told=SIGTERM)
    how = "ended by SIGTERM, which ranks do not handle" if cut_off else "stopped in good order after SIGTERM"
    assert stage.over == [(exitcodes.REQUEUE, how + kept)]


def test_a_companion_that_may_not_run_ends_the_run(stage: LeaderHarness) -> None:
    """It would be the same at each start."""
    stage.fail("n1", 0, "environment", error=RankError(COMPANION_REFUSED, "the companion `x` may not", ""))
    stage.loop.advance(2.0)
    assert stage.over == [(exitcodes.USAGE, "the companion `x` may not")]
    assert stage.slots == [NODES]


def test_the_run_is_done_when_all_nodes_are(stage: LeaderHarness) -> None:
    """Exit code 0 only after the last node."""
    for name in NODES:
        assert not stage.over
        stage.finish_ranks(name)
    assert stage.over == [(exitcodes.OK, "all ranks finished")]


def standing(rank: int, stuck_s: float, phase: str = "collective", **fields: Any) -> RankStatus:
    limit_s = {"data": 20.0, "evaluation": 120.0}.get(phase, 5.0)
    waits = phase == "collective"
    told = {"process": "S", **fields}
    return RankStatus(rank, phase, phase, 7, -stuck_s, stuck_s, limit_s, waits=waits, **told)


def stand(stage: LeaderHarness, **ranks: RankStatus) -> None:
    for name, rank in ranks.items():
        aged = replace(rank, changed=-rank.changed)
        stage.tell(name, messages.RankStatuses(stage.generation, (aged,), f"/stacks-{name}.txt"))


def test_a_hang_is_named_from_the_standings_of_all_nodes(stage: LeaderHarness) -> None:
    """The ranks of two nodes wait in a collective for one that is stopped on the third."""
    stage.tell("n1", messages.Hung(stage.generation))
    assert stage.group.orders == [RankStatusesWanted(1)]
    stand(stage, n1=standing(0, 6), n2=standing(2, 6), n3=standing(4, 6.2, "backward", process="T"))
    (event,) = stage.events("hang_detected")
    assert (event["rank"], event["culprit_node"], event["stacks"]) == (4, "n3", "/stacks-n3.txt")
    assert len(stage.slots) == 2


def test_who_waits_for_a_rank_that_may_take_its_time_does_not_hang(stage: LeaderHarness) -> None:
    """A rank on another node evaluates, within its limit."""
    stage.tell("n1", messages.Hung(stage.generation))
    stand(stage, n1=standing(0, 6), n2=standing(2, 6), n3=standing(4, 30, "evaluation"))
    assert len(stage.slots) == 1
    stage.tell("n1", messages.Hung(stage.generation))
    assert len(stage.group.orders) == 2, "asked again the next time"


def test_ranks_that_wait_for_a_node_that_is_done_hang(stage: LeaderHarness) -> None:
    """Uneven data: the ranks of one node have ended in good order, and the others wait for them."""
    stage.finish_ranks("n1")
    stage.tell("n2", messages.Hung(stage.generation))
    stand(stage, n2=standing(2, 6), n3=standing(4, 6))
    (event,) = stage.events("hang_detected")
    assert event["phase"] == "collective"
    assert len(stage.slots) == 2


def test_no_node_is_blamed_for_a_hang_of_which_none_stands_out(stage: LeaderHarness) -> None:
    """However often it comes."""
    for _ in range(2):
        stage.tell("n1", messages.Hung(stage.generation))
        stand(stage, n1=standing(0, 6), n2=standing(2, 6), n3=standing(4, 6))
        stage.begin()
    assert [event["culprit_node"] for event in stage.events("hang_detected")] == [None, None]
    assert stage.slots == [NODES] * 3


def test_messages_of_an_earlier_generation_are_ignored(stage: LeaderHarness) -> None:
    """What was sent before the plan changed is about ranks that are gone."""
    stage.tell("n1", messages.RestartWanted(0, ""))
    stage.loop.advance(5)
    assert len(stage.slots) == 1


def test_events_of_all_nodes_make_one_log(stage: LeaderHarness) -> None:
    """A checkpoint that three nodes saw become durable is one event; the time is that of the leader's clock."""
    record = {"t": 7.0, "event": "checkpoint_committed", "generation": 1, "step": 20, "node": "n2"}
    for name in NODES:
        stage.tell(name, messages.Event({**record, "node": name}, 0.5))
    (event,) = stage.events("checkpoint_committed")
    (started,) = stage.events("generation_started")
    assert abs(event["t"] - started["t"]) < 60


def test_the_next_leader_goes_on_with_the_log(stage: LeaderHarness) -> None:
    """What the leader before it has written is not written again."""
    record = {"t": 7.0, "event": "resumed", "generation": 1, "step": 20, "node": "n2"}
    stage.tell("n2", messages.Event(record, 0.0))
    stage.leader = stage.new_leader()
    stage.tell("n3", messages.Event(record, 0.0))
    assert len(stage.events("resumed")) == 1
