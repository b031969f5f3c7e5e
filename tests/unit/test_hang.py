"""The judge of hangs: slow is not hung, hung is named in time, with the right culprit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.launch.hangs.culprit import Hang
from opsd.launch.hangs.hang import HangDetector
from opsd.launch.hangs.limits import HangLimits
from opsd.launch.hangs.stacks import Frame, Stack, Thread
from tests.fakes.ranks import FakeRank

POLL_S = 0.1


class World:
    """Ranks, a judge and the clock of both."""

    def __init__(self, ranks: int = 2, limits: HangLimits | None = None) -> None:
        self.now = 100.0
        self.judge = HangDetector(limits or HangLimits())
        self.ranks = [FakeRank(number, born=self.now, since=self.now) for number in range(ranks)]
        self.stacks: dict[int, Stack] = {}

    def look(self) -> Hang | None:
        """What the launcher does at every poll."""
        stall = self.judge.check([rank.observed(self.now) for rank in self.ranks], self.now)
        return self.judge.verdict(stall, self.stacks) if stall is not None and stall.due else None

    def pass_time(self, seconds: float) -> Hang | None:
        """Let time pass with nobody moving, until a hang is named."""
        end = self.now + seconds
        while self.now < end:
            self.now += POLL_S
            hang = self.look()
            if hang is not None:
                self.judge.accept(hang.phase, hang.score)
                return hang
        return None

    def train(self, steps: int, step_s: float = 0.2, **phase_s: float) -> None:
        """Complete steps on all ranks together; none of them may be taken for a hang."""
        for _ in range(steps):
            assert self.pass_time(step_s) is None
            for rank in self.ranks:
                rank.step(self.now, step_s, **phase_s)
        assert self.look() is None

    def restart(self) -> None:
        """Begin a new generation of the same ranks."""
        self.judge.new_generation()
        self.ranks = [FakeRank(rank.rank, born=self.now, since=self.now) for rank in self.ranks]
        self.stacks = {}


def stack(*frames: tuple[str, str]) -> Stack:
    """A stack with one thread, innermost frame first."""
    return Stack((Thread("MainThread", True, True, tuple(Frame(name, file, 1) for name, file in frames)),))


def in_phases(*phases: str) -> Callable[[World], None]:
    """Put each rank into a phase, a moment apart."""

    def enter(world: World) -> None:
        for rank, phase in zip(world.ranks, phases, strict=True):
            rank.enter(phase, world.now)

    return enter


def test_stopped_process_is_named_in_time() -> None:
    """A rank that got SIGSTOP is named within five seconds of the last change, with its process state as evidence."""
    world = World()
    world.train(20)
    last_change = world.now
    world.ranks[0].enter("collective", world.now)
    world.ranks[1].process = "T"
    hang = world.pass_time(60)
    assert hang is not None
    assert hang.rank == 1
    assert world.now - last_change <= 5.0
    assert "state T" in hang.reason
    assert any("rank 0 waits in a collective" in sentence for sentence in hang.evidence)


def test_limit_grows_with_the_step() -> None:
    """With steps of ten seconds nothing is a hang before nearly thirty, and at thirty it is."""
    world = World()
    world.train(10, step_s=10.0)
    assert world.pass_time(29.0) is None
    assert world.pass_time(1.0) is not None


def test_one_slow_step_in_a_hundred_does_not_raise_the_limit() -> None:
    """The limit is learnt from the 99th percentile, so that one outlier does not blunt it."""
    world = World()
    world.train(300, step_s=0.1)
    world.train(1, step_s=4.0)
    world.train(10, step_s=0.1)
    assert world.judge.limits.limit("forward") == 5.0


def test_first_steps_may_take_long() -> None:
    """Loading and compiling are not a hang, until the limit for them is reached."""
    world = World(limits=HangLimits(startup_s=300.0))
    in_phases("forward", "forward")(world)
    assert world.pass_time(299.0) is None
    assert world.pass_time(2.0) is not None


def test_start_of_later_generations_is_learnt() -> None:
    """After a start of 20 s, a later start that stands still for 100 s is a hang, one of 90 s is not."""
    world = World()
    world.train(2, step_s=10.0)
    world.train(6, step_s=0.1)
    assert world.judge.limits.limit("other") == 5.0
    world.restart()
    assert world.pass_time(90.0) is None
    assert world.pass_time(15.0) is not None


@pytest.mark.parametrize(
    ("phase", "allowed_s", "hung_s"), [("forward", 4.5, 5.0), ("data", 19.0, 20.0), ("checkpoint", 3500.0, 3600.0)]
)
def test_each_phase_has_its_limit(phase: str, allowed_s: float, hung_s: float) -> None:
    """How long a rank may stand still depends on what it is doing."""
    world = World()
    world.train(10)
    in_phases(phase, phase)(world)
    assert world.pass_time(allowed_s) is None
    hang = world.pass_time(hung_s - allowed_s + POLL_S)
    assert hang is not None
    assert hang.phase == phase


def test_checkpoint_and_evaluation_limits_are_learnt() -> None:
    """Five times the longest checkpoint and evaluation seen are allowed, with a floor."""
    world = World()
    world.train(10)
    world.ranks[0].step(world.now, 40.0, checkpoint=30.0, evaluation=10.0)
    world.look()
    assert world.judge.limits.limit("checkpoint") == 150.0
    assert world.judge.limits.limit("evaluation") == 120.0
    assert world.judge.limits.limit("forward") == 5.0


def test_waiting_for_a_rank_within_its_limit_is_no_hang() -> None:
    """A rank in a collective may wait for one that saves a checkpoint, however long its own limit is exceeded."""
    world = World()
    world.train(10)
    in_phases("collective", "checkpoint")(world)
    assert world.pass_time(120.0) is None
    world.train(1)
    assert world.judge.limits.limit("collective") == 5.0


def test_rank_hangs_though_others_go_on_without_it() -> None:
    """Where ranks are not coupled, the progress of others is no excuse."""
    world = World()
    world.train(10)
    hang = None
    for _ in range(100):
        world.now += 0.1
        world.ranks[1].step(world.now, 0.1)
        hang = hang or world.look()
    assert hang is not None
    assert hang.rank == 0
    assert "all others are further" in " ".join(hang.evidence)


def test_rank_outside_the_collective_is_the_culprit() -> None:
    """With all processes alive, the one that has not come to the collective is named."""
    world = World(ranks=4)
    world.train(10)
    in_phases("collective", "collective", "forward", "collective")(world)
    hang = world.pass_time(10)
    assert hang is not None
    assert hang.rank == 2
    assert "ranks 0, 1, 3 wait in a collective" in hang.reason


def test_stacks_tell_who_waits_in_an_unmarked_collective() -> None:
    """A rank inside an all-reduce by its stack is no culprit, whatever phase it reported."""
    world = World()
    world.train(10)
    in_phases("backward", "backward")(world)
    world.stacks = {
        0: stack(("wait", "torch/distributed/x.py"), ("all_reduce", "torch/distributed/distributed_c10d.py")),
        1: stack(("augment", "mine.py")),
    }
    hang = world.pass_time(10)
    assert hang is not None
    assert hang.rank == 1
    assert "its main thread is in augment (mine.py:1)" in hang.evidence


def test_nobody_is_named_when_nobody_stands_out() -> None:
    """All ranks waiting in the same collective since the same moment: the culprit is unknown, and said to be."""
    world = World()
    world.train(10)
    in_phases("collective", "collective")(world)
    hang = world.pass_time(10)
    assert hang is not None
    assert hang.rank is None
    assert "no rank stands out" in hang.reason


def test_compiling_excuses() -> None:
    """A recompilation in the middle of the run gets the time of a start."""
    world = World()
    world.train(10, step_s=1.0)
    in_phases("forward", "forward")(world)
    world.stacks = {0: stack(("compile_fx", "/x/torch/_inductor/compile_fx.py")), 1: stack(("all_gather", "c10d.py"))}
    assert world.pass_time(50.0) is None
    world.train(1, step_s=0.1)
    world.stacks = {}
    assert world.pass_time(10.0) is not None


def test_pause_of_the_launcher_is_no_hang() -> None:
    """After a suspended job goes on, nobody is blamed for the time in which nobody could move."""
    world = World()
    world.train(10)
    world.now += 3600
    assert world.look() is None
    assert world.pass_time(4.5) is None
    assert world.pass_time(1.0) is not None


def test_slow_but_finite_gets_through() -> None:
    """Something unmarked that takes 12 s is killed once, allowed at the next attempt, and remembered from then on."""
    world = World()
    world.train(10)
    assert world.pass_time(12.0) is not None
    world.restart()
    world.train(10)
    assert world.pass_time(12.0) is None
    world.train(1)
    assert world.judge.limits.limit("other") >= 15.0


def test_certain_hang_does_not_raise_limits() -> None:
    """A stopped process says nothing about how slow the run may be."""
    world = World()
    world.train(10)
    world.ranks[0].process = "T"
    assert world.pass_time(6.0) is not None
    assert world.judge.limits.limit("other") == 5.0


@pytest.mark.parametrize("phases", [("checkpoint", "collective"), ("backward", "checkpoint")])
def test_a_stopped_rank_is_found_at_once(phases: tuple[str, str]) -> None:
    """A stopped process makes no progress, whatever it was doing and however long another rank may be at work."""
    world = World()
    world.train(10)
    in_phases(*phases)(world)
    world.ranks[0].process = "T"
    hang = world.pass_time(6.0)
    assert hang is not None
    assert hang.rank == 0


def test_finished_ranks_neither_excuse_nor_take_the_blame() -> None:
    """While one rank has not finished, those that have are out of the question."""
    world = World()
    world.train(10)
    world.ranks[0].state = "finished"
    world.now += 1.0
    world.ranks[1].enter("optimizer", world.now)
    hang = world.pass_time(6.0)
    assert hang is not None
    assert hang.rank == 1


def test_finished_rank_may_take_its_time_to_exit() -> None:
    """A rank that has finished its work is not held to the limits of a step."""
    world = World(ranks=1)
    world.train(10)
    world.ranks[0].state = "finished"
    assert world.pass_time(500.0) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 4.5), min_size=5, max_size=40))
def test_a_run_that_moves_is_never_hung(step_s: list[float]) -> None:
    """No sequence of steps below the least limit is ever taken for a hang."""
    world = World()
    for seconds in step_s:
        world.train(1, step_s=seconds)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 8.0), st.integers(2, 6), st.data())
def test_every_standstill_is_named_in_time(step_s: float, ranks: int, data: st.DataObject) -> None:
    """Whatever the step time, a stopped rank is the culprit, named by max(5 s, 3 x step) after the last change."""
    world = World(ranks=ranks)
    world.train(8, step_s=step_s)
    culprit = data.draw(st.integers(0, ranks - 1))
    last_change = world.now
    for rank in world.ranks:
        rank.enter("collective" if rank.rank != culprit else "backward", world.now)
    world.ranks[culprit].process = "T"
    hang = world.pass_time(100.0)
    assert hang is not None
    assert hang.rank == culprit
    assert world.now - last_change <= max(5.0, 3 * step_s * 1.05)
