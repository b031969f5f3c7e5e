"""What the leader of a run makes of failures, hangs, requests and unfit nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opsd import exitcodes
from opsd.launch.hangs.hang import RankStatus
from opsd.launch.ranks.failure import COMPANION_REFUSED, RankError
from opsd.launch.run import messages
from opsd.launch.run.messages import RankStatusesWanted, Stop, StopOrdered, StopReason
from tests.fakes.leader import NODES, SIGTERM, SPARE, LeaderHarness, swap_of

# What the leader of a run makes of failures, hangs and requests; its peers and the time are simulated.


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


# Nodes with broken hardware: the leader leaves them behind, in this start of the run and in the next.


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


# A run with fewer nodes than it may have, and spares that come.


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
