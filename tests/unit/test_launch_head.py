"""What the head of a run on several nodes decides, with its fellows and the time played."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from opsd import exitcodes
from opsd.launch.failure import Failure, RankError, RestartPolicy
from opsd.launch.hang import Standing
from opsd.launch.head import Head
from opsd.launch.loop import Timer
from opsd.launch.placement import Shape
from opsd.launch.quorum.port import Listener, Member, Message, Plan
from opsd.launch.reports import failure_to_json, standings_to_json
from opsd.launch.run_log import RunLog

NODES = ("n1", "n2", "n3")
SPARE = "n4"


def member(name: str) -> Member:
    return Member(name, f"10.0.0.{name[1:]}", 20_000)


class PlayedLoop:
    """Timers whose time passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay_s, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
        self.now = end


class PlayedQuorum:
    """An agreement in which everybody who is alive always agrees."""

    def __init__(self, *names: str) -> None:
        self.own = member("n1")
        self.head: str | None = "n1"
        self.plan: Plan | None = None
        self.alive = {name: member(name) for name in names}
        self.proposals: list[Plan] = []
        self.orders: list[Message] = []

    def start(self, listener: Listener) -> None: ...

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> int:
        members = tuple(self.alive[name] for name in sorted(self.alive))
        self.proposals.append(Plan(len(self.proposals) + 1, slots, members, json.loads(json.dumps(payload))))
        return len(self.proposals)

    def ready(self, number: int, answer: Message) -> None: ...

    def tell_head(self, message: Message) -> None: ...

    def tell_all(self, message: Message) -> None:
        self.orders.append(message)

    def decide_tie(self, go_on: bool) -> None: ...

    def leave(self) -> None: ...


class Stage:
    """A head and its world: two ranks a node."""

    def __init__(self, folder: Path, *alive: str, least: int = 3, most: int = 3, max_restarts: int = 8) -> None:
        self.loop = PlayedLoop()
        self.quorum = PlayedQuorum(*alive)
        self.folder = folder
        self.bad: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.shape = Shape(least, most, (*NODES, SPARE), join_s=60.0)
        self.max_restarts = max_restarts
        self.head = self.new_head()

    def new_head(self) -> Head:
        log = RunLog("run", "n1", self.folder / "events.jsonl")
        policy = RestartPolicy(self.max_restarts)
        return Head(self.shape, self.quorum, self.loop, policy, log, lambda *bad: self.bad.append(bad))  # type: ignore[arg-type]

    def begun(self) -> Stage:
        """The last proposal becomes valid."""
        plan = self.quorum.plan = self.quorum.proposals[-1]
        self.head.began(plan, self.answers(plan))
        return self

    def answers(self, plan: Plan) -> dict[str, Message]:
        names = [member.name for member in plan.members]
        return {name: {"local_size": 2, "port": 1, "furthest": None, "committed": None} for name in names}

    def lose(self, *names: str) -> None:
        for name in names:
            del self.quorum.alive[name]
        for name in names:
            self.head.lost(name, 2.0)

    def tell(self, sender: str, kind: str, **fields: Any) -> None:
        plan = self.quorum.plan
        number = plan.number if plan is not None else 0
        self.head.received(sender, {"kind": kind, "generation": number, **fields})

    def fail(self, sender: str, rank: int, kind: Any, **fields: Any) -> None:
        failure = Failure(rank, "exit code 1", kind, 100.0, **fields)
        self.tell(sender, "failed", failures=[failure_to_json(failure, 100.0)])

    @property
    def over(self) -> list[tuple[int, str]]:
        """How the launchers were told to end."""
        return [(order["code"], order["reason"]) for order in self.quorum.orders if order["kind"] == "finish"]

    @property
    def slots(self) -> list[tuple[str, ...]]:
        return [plan.slots for plan in self.quorum.proposals]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == kind]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Three nodes at work and a spare."""
    stage = Stage(tmp_path, *NODES, SPARE)
    stage.head.take_over(None, {})
    return stage.begun()


def test_the_nodes_of_the_allocation_come_first(stage: Stage) -> None:
    """The first generation has the wanted number of nodes in the order of the allocation; the rest are spares."""
    assert stage.slots == [NODES]
    (event,) = stage.events("generation_started")
    assert (event["world_size"], event["nodes"], event["spares"]) == (6, list(NODES), [SPARE])


def test_a_spare_takes_the_place_of_a_lost_node(stage: Stage) -> None:
    """The other nodes keep their places, and so what they have in memory."""
    stage.lose("n2")
    assert stage.slots[-1] == ("n1", SPARE, "n3")
    stage.begun()
    assert stage.events("node_lost")[0]["lost"] == "n2"
    assert stage.events("spare_joined")[0]["joined"] == SPARE


def test_fewer_nodes_go_on_if_the_run_allows_it(tmp_path: Path) -> None:
    """Without a spare the places close up, down to the least number of nodes."""
    stage = Stage(tmp_path, *NODES, least=2)
    stage.head.take_over(None, {})
    stage.loop.advance(2)
    stage.begun().lose("n1")
    assert stage.slots[-1] == ("n2", "n3")
    stage.begun().lose("n2")
    stage.loop.advance(1)
    assert stage.over == [(exitcodes.REQUEUE, "too few nodes are left: 1 are there, 2 are needed")]
    assert stage.bad == [(("n1", "n2"), ())]


def test_a_node_that_comes_back_is_a_spare(stage: Stage) -> None:
    """It has lost its place, and takes that of the next one that is lost."""
    stage.lose("n2")
    stage.begun()
    stage.quorum.alive["n2"] = member("n2")
    stage.head.joined(member("n2"))
    assert len(stage.slots) == 2
    stage.lose("n3")
    assert stage.slots[-1] == ("n1", SPARE, "n2")


def test_a_node_lost_during_a_proposal_replaces_it(stage: Stage) -> None:
    """The next proposal does without both."""
    stage.quorum.alive["n5"] = member("n5")
    stage.lose("n2")
    stage.lose("n3")
    assert stage.slots[-2:] == [("n1", SPARE, "n3"), ("n1", SPARE, "n5")]


def test_the_first_generation_waits_for_its_nodes(tmp_path: Path) -> None:
    """Too few: not before the last has come. Enough, but not all that are expected: a little longer."""
    stage = Stage(tmp_path, "n1", least=2, most=3)
    stage.head.take_over(None, {})
    stage.loop.advance(10)
    assert stage.slots == []
    for name in ("n2", "n3"):
        stage.quorum.alive[name] = member(name)
        stage.head.joined(member(name))
    assert stage.slots == []
    stage.loop.advance(2)
    assert stage.slots == [NODES]


def test_a_spare_that_comes_later_gets_a_vote(stage: Stage) -> None:
    """The members are agreed on anew; the ranks run on, and what happens meanwhile is not overheard."""
    stage.quorum.alive["n5"] = member("n5")
    stage.head.joined(member("n5"))
    stage.loop.advance(1)
    plan = stage.quorum.proposals[-1]
    assert (plan.slots, plan.payload["keep"]) == (NODES, 1)
    stage.fail("n2", 2, "signal")
    stage.loop.advance(1)
    assert stage.quorum.proposals[-1].payload["keep"] == 0


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """When its time is up, the head says how many have come."""
    stage = Stage(tmp_path, "n1", "n2")
    stage.head.take_over(None, {})
    stage.loop.advance(61)
    assert stage.over == [(exitcodes.FAILED, "not enough launchers have come: 2 are there, 3 are needed")]
    assert stage.quorum.orders[-1]["kind"] == "finish"


def test_the_first_cause_is_blamed(stage: Stage) -> None:
    """Ranks that lost their connection have failed too, earlier or later; the other one is the cause."""
    stage.fail("n1", 0, "communication")
    stage.loop.advance(0.05)
    stage.fail("n2", 3, "user", error=RankError("ValueError", "boom", "train.py:7"))
    stage.loop.advance(0.2)
    assert stage.slots == [NODES, NODES]
    memory = stage.quorum.proposals[-1].payload["policy"]
    assert memory["user_errors"] == [[None, ["ValueError", "train.py:7", "boom"]]]


def test_victims_wait_for_the_loss_behind_them(stage: Stage) -> None:
    """Failures that only speak of lost connections are not judged before a lost node would have been noticed."""
    stage.fail("n1", 0, "communication")
    stage.loop.advance(2.0)
    assert len(stage.slots) == 1
    stage.lose("n3")
    assert stage.slots[1:] == [("n1", "n2", SPARE)]
    stage.loop.advance(5)
    assert len(stage.slots) == 2


def test_an_error_of_the_program_stops_the_run_at_the_second_time(stage: Stage) -> None:
    """Also if another launcher was head at the first time."""
    error = RankError("ValueError", "boom", "train.py:7")
    stage.fail("n2", 3, "user", error=error, step=5)
    stage.loop.advance(1)
    stage.begun()
    stage.head = stage.new_head()
    stage.head.take_over(stage.quorum.plan, stage.answers(stage.quorum.proposals[-1]))
    stage.fail("n2", 3, "user", error=error, step=5)
    stage.loop.advance(1)
    ((code, reason),) = stage.over
    assert code == exitcodes.REPEATED
    assert "Rank 3 on n2 failed after step 5 with ValueError: boom" in reason


def test_failing_hardware_is_left_behind(stage: Stage) -> None:
    """A rank that failed with its GPU gets another node, if there is one."""
    stage.fail("n3", 4, "hardware")
    stage.loop.advance(1)
    assert stage.slots[-1] == ("n1", "n2", SPARE)
    stage.begun().fail(SPARE, 4, "hardware")
    stage.loop.advance(1)
    assert stage.slots[-1] == ("n1", "n2", SPARE), "there is no other"


def test_a_node_at_fault_twice_is_left_behind(stage: Stage) -> None:
    """One killed rank may be chance, two on the same node are a reason to use the spare."""
    stage.fail("n1", 0, "signal", step=3)
    stage.loop.advance(1)
    assert stage.slots[-1] == NODES
    stage.begun().fail("n1", 1, "signal", step=9)
    stage.loop.advance(1)
    assert stage.slots[-1] == (SPARE, "n2", "n3")


def test_a_planned_swap_loses_nothing(stage: Stage) -> None:
    """All ranks checkpoint and stop, then the spare takes the place, and the run goes on."""
    stage.tell("n2", "swap", node="n3", reason="Xid 79")
    assert stage.quorum.orders == [{"kind": "order_stop", "by": "the swap of n3"}]
    for name in NODES:
        stage.tell(name, "ended", told="the swap of n3")
    assert stage.slots[-1] == ("n1", "n2", SPARE)
    assert not stage.over


def test_a_swap_outlives_its_head(stage: Stage) -> None:
    """The next head learns from the ranks' end that they were stopped for a swap, and does not end the run."""
    stage.tell("n2", "swap", node="n3", reason="Xid 79")
    stage.head = stage.new_head()
    stage.head.take_over(stage.quorum.plan, stage.answers(stage.quorum.proposals[-1]))
    for name in NODES:
        stage.tell(name, "ended", told="the swap of n3")
    assert not stage.over
    assert len(stage.slots) == 2


def test_no_swap_without_a_spare(tmp_path: Path) -> None:
    """The run is not interrupted for nothing."""
    stage = Stage(tmp_path, *NODES)
    stage.head.take_over(None, {})
    stage.loop.advance(2)
    stage.begun().tell("n1", "swap", node="n2", reason="")
    assert (stage.slots, stage.quorum.orders) == ([NODES], [])
    assert stage.events("swap_refused")[0]["swap"] == "n2"


def test_a_stop_ends_in_a_requeue(stage: Stage) -> None:
    """Whoever got the signal: all are told once, and the run ends when all have stopped."""
    for name in NODES:
        stage.tell(name, "stop", by="SIGTERM")
    assert stage.quorum.orders == [{"kind": "order_stop", "by": "SIGTERM"}]
    stage.tell("n1", "ended", told="SIGTERM")
    stage.tell("n2", "ended", told="SIGTERM")
    assert not stage.over
    stage.tell("n3", "ended", told="SIGTERM")
    assert stage.over == [(exitcodes.REQUEUE, "stopped in good order after SIGTERM")]


def test_the_run_is_done_when_all_nodes_are(stage: Stage) -> None:
    """Exit code 0 only after the last node."""
    for name in NODES:
        assert not stage.over
        stage.tell(name, "ended", told="")
    assert stage.over[0][0] == exitcodes.OK
    assert stage.quorum.orders[-1] == {"kind": "finish", "code": 0, "reason": "all ranks finished"}


def standing(rank: int, stuck_s: float, phase: str = "collective", **fields: Any) -> Standing:
    limit_s = {"data": 20.0, "evaluation": 120.0}.get(phase, 5.0)
    waits = phase == "collective"
    told = {"process": "S", **fields}
    return Standing(rank, phase, phase, 7, -stuck_s, stuck_s, limit_s, waits=waits, **told)


def stand(stage: Stage, **ranks: Standing) -> None:
    for name, rank in ranks.items():
        stage.tell(name, "standings", ranks=standings_to_json([rank], 0.0), stacks=f"/stacks-{name}.txt")


def test_a_hang_is_named_from_the_standings_of_all_nodes(stage: Stage) -> None:
    """The ranks of two nodes wait in a collective for one that is stopped on the third."""
    stage.tell("n1", "hung")
    assert stage.quorum.orders == [{"kind": "standings?", "generation": 1}]
    stand(stage, n1=standing(0, 6), n2=standing(2, 6), n3=standing(4, 6.2, "backward", process="T"))
    (event,) = stage.events("hang_detected")
    assert (event["rank"], event["culprit_node"], event["stacks"]) == (4, "n3", "/stacks-n3.txt")
    assert len(stage.slots) == 2


def test_who_waits_for_a_rank_that_may_take_its_time_does_not_hang(stage: Stage) -> None:
    """A rank on another node evaluates, within its limit."""
    stage.tell("n1", "hung")
    stand(stage, n1=standing(0, 6), n2=standing(2, 6), n3=standing(4, 30, "evaluation"))
    assert len(stage.slots) == 1
    stage.tell("n1", "hung")
    assert len(stage.quorum.orders) == 2, "asked again the next time"


def test_messages_of_an_earlier_generation_are_ignored(stage: Stage) -> None:
    """What was sent before the plan changed is about ranks that are gone."""
    failure = Failure(0, "exit code 1", "user", 0.0)
    old = {"kind": "failed", "generation": 0, "failures": [failure_to_json(failure, 0.0)]}
    stage.head.received("n1", old)
    stage.loop.advance(5)
    assert len(stage.slots) == 1


def test_events_of_all_nodes_make_one_story(stage: Stage) -> None:
    """A checkpoint that three nodes saw become durable is one event; the time is that of the head's clock."""
    record = {"t": 7.0, "event": "checkpoint_committed", "generation": 1, "step": 20, "node": "n2"}
    for name in NODES:
        stage.tell(name, "event", record={**record, "node": name}, age_s=0.5)
    (event,) = stage.events("checkpoint_committed")
    (started,) = stage.events("generation_started")
    assert abs(event["t"] - started["t"]) < 60


def test_the_next_head_goes_on_with_the_story(stage: Stage) -> None:
    """What the head before it has written is not written again."""
    record = {"t": 7.0, "event": "resumed", "generation": 1, "step": 20, "node": "n2"}
    stage.tell("n2", "event", record=record, age_s=0.0)
    stage.head = stage.new_head()
    stage.tell("n3", "event", record=record, age_s=0.0)
    assert len(stage.events("resumed")) == 1
