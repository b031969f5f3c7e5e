"""Spares that say whether they may be used, and the leader of a run that goes by it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from opsd.launch.run import messages
from opsd.launch.run.messages import StopOrdered
from opsd.launch.run.readiness import Readiness
from tests.fakes.leader import NODES, SPARE, FakeGroup, FakeLoop, LeaderHarness, swap_of


def started(folder: Path, *spares: str, wait_s: float = 0.0) -> LeaderHarness:
    """Three nodes at work, and these spares."""
    return LeaderHarness.at_work(folder, *NODES, *spares, wait_s=wait_s)


def print_message(stage: LeaderHarness, spare: str, why: str) -> None:
    """A spare tells whether it may be used."""
    stage.tell(spare, messages.Readiness(why))


def test_a_spare_that_is_not_ready_is_not_used(tmp_path: Path) -> None:
    """It says why, which is told once; the run waits for it, and goes on once it is ready."""
    stage = started(tmp_path, SPARE, wait_s=60.0)
    for _ in range(2):
        print_message(stage, SPARE, "data: x was damaged")
    (refused,) = stage.events("spare_refused")
    assert (refused["refused"], refused["reason"]) == (SPARE, "data: x was damaged")
    stage.lose("n2")
    stage.loop.advance(30)
    assert (stage.slots, stage.over) == ([NODES, ()], [])
    print_message(stage, SPARE, "")
    assert stage.slots == [NODES, (), ("n1", SPARE, "n3")]


def test_a_spare_may_turn_out_not_to_be_ready(tmp_path: Path) -> None:
    """Asked once more when it is about to be used: a new proposal is made without it."""
    stage = started(tmp_path, SPARE, "n5")
    stage.lose("n2")
    assert stage.slots[-1] == ("n1", SPARE, "n3")
    print_message(stage, SPARE, "its last verification is too old")
    assert stage.slots[-1] == ("n1", "n5", "n3")


def test_a_lemon_is_used_where_there_is_no_other_spare(tmp_path: Path) -> None:
    """The cluster's history says that it will fail again."""
    stage = started(tmp_path, SPARE, "n5")
    stage.tell(SPARE, messages.Readiness("", lemon=True))
    stage.tell("n5", messages.Readiness(""))
    stage.lose("n2")
    assert stage.slots[-1] == ("n1", "n5", "n3")
    stage.lose("n3")
    assert stage.slots[-1] == ("n1", "n5", SPARE)


def test_the_run_ends_without_a_spare_that_is_ready(tmp_path: Path) -> None:
    """It is given back to Slurm rather than go on with damaged data; the spare is not held against the next start."""
    stage = started(tmp_path, SPARE)
    stage.lose("n2")
    print_message(stage, SPARE, "data: x was damaged")
    stage.loop.advance(1)
    assert [code for code, _ in stage.over] == [75]
    assert stage.bad == [(("n2",), ())]


def test_a_node_is_not_swapped_for_a_spare_that_is_not_ready(tmp_path: Path) -> None:
    """The ranks run on, and the answer says why."""
    stage = started(tmp_path, SPARE)
    print_message(stage, SPARE, "software: torch is missing, 2.9 is wanted")
    stage.swap("n2", "ecc")
    assert stage.events("swap_refused")[0]["swap"] == "n2"
    assert not any(isinstance(order, StopOrdered) for order in stage.group.orders)


class Asked:
    """What a node says of itself: the given answers one after the other, OSErrors raised."""

    def __init__(self, *answers: str | OSError, lemon: bool | None = None) -> None:
        self._answers = list(answers)
        self.refused: list[str] = []
        self.taken = 0
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._loop = FakeLoop()
        self._group = FakeGroup(SPARE)
        self.asked_lemon = 0
        self._lemon = lemon is True
        self._readiness = Readiness(
            self._loop,
            self._group,  # type: ignore[arg-type]
            self._answer,
            self.refused.append,
            None if lemon is None else self._is_lemon,
        )

    @property
    def told(self) -> list[str]:
        return [message.why for message in self._group.told if isinstance(message, messages.Readiness)]

    @property
    def told_lemon(self) -> bool:
        """What the leader knows last."""
        return [message.lemon for message in self._group.told if isinstance(message, messages.Readiness)][-1]

    def hang(self) -> threading.Event:
        """Let the next answer wait for this."""
        self._goes_on = threading.Event()
        return self._goes_on

    def pass_time(self, seconds: float) -> None:
        """Some time goes by."""
        self._loop.advance(seconds)

    def settle(self) -> None:
        """The answer has come."""
        self._loop.settle()

    def _answer(self) -> str:
        assert self._goes_on.wait(20)
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _is_lemon(self) -> bool:
        self.asked_lemon += 1
        return self._lemon

    def look(self) -> None:
        """It is time to look again."""
        self._readiness.tell()
        self._loop.settle()

    def take_a_place(self, *, answered: bool = True) -> None:
        """The leader has made a plan with this node at work."""
        asks = bool(self._answers)
        self._readiness.before(self._take)
        if asks and answered:
            self._loop.settle()

    def _take(self) -> None:
        self.taken += 1


def test_a_controller_that_is_down_makes_no_spare_unready() -> None:
    """What was known last holds, and a swap does not ask again."""
    asked = Asked("", OSError("the controller is away"))
    asked.look()
    asked.look()
    asked.take_a_place()
    assert (asked.told, asked.refused, asked.taken) == ([""], [], 1)


def test_a_node_of_which_nothing_is_known_is_not_used() -> None:
    """It takes no part until it is known to be ready."""
    asked = Asked(OSError("the controller is away"), "")
    asked.take_a_place()
    assert (asked.told, asked.taken) == (["the controller is away"], 0)
    asked.take_a_place()
    assert (asked.told[-1], asked.taken) == ("", 1)


def test_a_node_that_cannot_find_out_whether_it_is_ready_gives_its_place_up() -> None:
    """A file server hangs: nobody else ends that wait if the node is the leader."""
    asked = Asked("")
    hang = asked.hang()
    asked.take_a_place(answered=False)
    asked.pass_time(59.0)
    assert asked.told == []
    asked.pass_time(2.0)
    assert asked.told == ["whether it is ready could not be found out within 60 s"]
    hang.set()
    asked.settle()
    assert (asked.told[-1], asked.taken) == ("", 0)


def test_a_node_that_is_not_ready_says_so_again_when_it_is_wanted() -> None:
    """A new leader has not heard it."""
    asked = Asked("data: x was damaged")
    asked.look()
    asked.take_a_place()
    assert (asked.told, asked.refused, asked.taken) == (["data: x was damaged"] * 2, ["data: x was damaged"], 0)


def test_a_node_stays_if_its_spare_turns_out_not_to_be_ready(tmp_path: Path) -> None:
    """Its ranks have checkpointed and ended for a planned swap: they start again where they were."""
    stage = started(tmp_path, SPARE)
    stage.swap("n2", "ecc")
    stage.finish_ranks(*NODES, told=swap_of("n2"))
    assert stage.slots[-1] == ("n1", SPARE, "n3")
    print_message(stage, SPARE, "data: x was damaged")
    assert (stage.slots[-1], stage.over) == (NODES, [])
    assert stage.events("swap_refused")[0]["swap"] == "n2"


@pytest.mark.parametrize("lemon", [True, False])
def test_a_spare_says_whether_it_keeps_failing(lemon: bool) -> None:
    """With each answer, as the leader may be a new one; what the cluster remembers is looked up once."""
    asked = Asked("", "", lemon=lemon)
    asked.look()
    asked.settle()
    assert asked.told_lemon is lemon
    asked.look()
    assert (asked.told_lemon, asked.asked_lemon) == (lemon, 1)
