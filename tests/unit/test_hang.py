"""The judge of hangs: slow is not hung, hung is named in time, with the right culprit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.attribution import TRACED
from opsd.launch.hangs.capture import Frame, Stack, Thread
from opsd.launch.hangs.hang import Hang, HangDetector
from opsd.launch.hangs.limits import HangLimits
from tests.fakes.ranks import AT_WORK, IN_COLLECTIVE, LIMITS, REPORTERS, FakeRank, World

# The judge of hangs: slow is not hung, hung is named in time, with the right culprit.


POLL_S = 0.1


class Judged:
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


def in_phases(*phases: str) -> Callable[[Judged], None]:
    """Put each rank into a phase, a moment apart."""

    def enter(world: Judged) -> None:
        for rank, phase in zip(world.ranks, phases, strict=True):
            rank.enter(phase, world.now)

    return enter


def test_stopped_process_is_named_in_time() -> None:
    """A rank that got SIGSTOP is named within five seconds of the last change, with its process state as evidence."""
    world = Judged()
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
    world = Judged()
    world.train(10, step_s=10.0)
    assert world.pass_time(29.0) is None
    assert world.pass_time(1.0) is not None


def test_one_slow_step_in_a_hundred_does_not_raise_the_limit() -> None:
    """The limit is learnt from the 99th percentile, so that one outlier does not blunt it."""
    world = Judged()
    world.train(300, step_s=0.1)
    world.train(1, step_s=4.0)
    world.train(10, step_s=0.1)
    assert world.judge.limits.limit("forward") == 5.0


def test_first_steps_may_take_long() -> None:
    """Loading and compiling are not a hang, until the limit for them is reached."""
    world = Judged(limits=HangLimits(startup_s=300.0))
    in_phases("forward", "forward")(world)
    assert world.pass_time(299.0) is None
    assert world.pass_time(2.0) is not None


def test_start_of_later_generations_is_learnt() -> None:
    """After a start of 20 s, a later start that stands still for 100 s is a hang, one of 90 s is not."""
    world = Judged()
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
    world = Judged()
    world.train(10)
    in_phases(phase, phase)(world)
    assert world.pass_time(allowed_s) is None
    hang = world.pass_time(hung_s - allowed_s + POLL_S)
    assert hang is not None
    assert hang.phase == phase


def test_checkpoint_and_evaluation_limits_are_learnt() -> None:
    """Five times the longest checkpoint and evaluation seen are allowed, with a floor."""
    world = Judged()
    world.train(10)
    world.ranks[0].step(world.now, 40.0, checkpoint=30.0, evaluation=10.0)
    world.look()
    assert world.judge.limits.limit("checkpoint") == 150.0
    assert world.judge.limits.limit("evaluation") == 120.0
    assert world.judge.limits.limit("forward") == 5.0


def test_waiting_for_a_rank_within_its_limit_is_no_hang() -> None:
    """A rank in a collective may wait for one that saves a checkpoint, however long its own limit is exceeded."""
    world = Judged()
    world.train(10)
    in_phases("collective", "checkpoint")(world)
    assert world.pass_time(120.0) is None
    world.train(1)
    assert world.judge.limits.limit("collective") == 5.0


def test_rank_hangs_though_others_go_on_without_it() -> None:
    """Where ranks are not coupled, the progress of others is no excuse."""
    world = Judged()
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
    world = Judged(ranks=4)
    world.train(10)
    in_phases("collective", "collective", "forward", "collective")(world)
    hang = world.pass_time(10)
    assert hang is not None
    assert hang.rank == 2
    assert "ranks 0, 1, 3 wait in a collective" in hang.reason


def test_stacks_tell_who_waits_in_an_unmarked_collective() -> None:
    """A rank inside an all-reduce by its stack is no culprit, whatever phase it reported."""
    world = Judged()
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
    world = Judged()
    world.train(10)
    in_phases("collective", "collective")(world)
    hang = world.pass_time(10)
    assert hang is not None
    assert hang.rank is None
    assert "no rank stands out" in hang.reason


def test_compiling_excuses() -> None:
    """A recompilation in the middle of the run gets the time of a start."""
    world = Judged()
    world.train(10, step_s=1.0)
    in_phases("forward", "forward")(world)
    world.stacks = {0: stack(("compile_fx", "/x/torch/_inductor/compile_fx.py")), 1: stack(("all_gather", "c10d.py"))}
    assert world.pass_time(50.0) is None
    world.train(1, step_s=0.1)
    world.stacks = {}
    assert world.pass_time(10.0) is not None


def test_pause_of_the_launcher_is_no_hang() -> None:
    """After a suspended job goes on, nobody is blamed for the time in which nobody could move."""
    world = Judged()
    world.train(10)
    world.now += 3600
    assert world.look() is None
    assert world.pass_time(4.5) is None
    assert world.pass_time(1.0) is not None


def test_slow_but_finite_gets_through() -> None:
    """Something unmarked that takes 12 s is killed once, allowed at the next attempt, and remembered from then on."""
    world = Judged()
    world.train(10)
    assert world.pass_time(12.0) is not None
    world.restart()
    world.train(10)
    assert world.pass_time(12.0) is None
    world.train(1)
    assert world.judge.limits.limit("other") >= 15.0


def test_certain_hang_does_not_raise_limits() -> None:
    """A stopped process says nothing about how slow the run may be."""
    world = Judged()
    world.train(10)
    world.ranks[0].process = "T"
    assert world.pass_time(6.0) is not None
    assert world.judge.limits.limit("other") == 5.0


@pytest.mark.parametrize("phases", [("checkpoint", "collective"), ("backward", "checkpoint")])
def test_a_stopped_rank_is_found_at_once(phases: tuple[str, str]) -> None:
    """A stopped process makes no progress, whatever it was doing and however long another rank may be at work."""
    world = Judged()
    world.train(10)
    in_phases(*phases)(world)
    world.ranks[0].process = "T"
    hang = world.pass_time(6.0)
    assert hang is not None
    assert hang.rank == 0


def test_finished_ranks_neither_excuse_nor_take_the_blame() -> None:
    """While one rank has not finished, those that have are out of the question."""
    world = Judged()
    world.train(10)
    world.ranks[0].state = "finished"
    world.now += 1.0
    world.ranks[1].enter("optimizer", world.now)
    hang = world.pass_time(6.0)
    assert hang is not None
    assert hang.rank == 1


def test_finished_rank_may_take_its_time_to_exit() -> None:
    """A rank that has finished its work is not held to the limits of a step."""
    world = Judged(ranks=1)
    world.train(10)
    world.ranks[0].state = "finished"
    assert world.pass_time(500.0) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 4.5), min_size=5, max_size=40))
def test_a_run_that_moves_is_never_hung(step_s: list[float]) -> None:
    """No sequence of steps below the least limit is ever taken for a hang."""
    world = Judged()
    for seconds in step_s:
        world.train(1, step_s=seconds)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 8.0), st.integers(2, 6), st.data())
def test_every_standstill_is_named_in_time(step_s: float, ranks: int, data: st.DataObject) -> None:
    """Whatever the step time, a stopped rank is the culprit, named by max(5 s, 3 x step) after the last change."""
    world = Judged(ranks=ranks)
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


# The judge of hangs on programs that report much, little or nothing: all that is slow, and all that hangs.


Act = Callable[[World], float]
"""Begins something on a world's ranks; returns how many seconds it takes."""


def _all(phase: str, seconds: float, *frames: tuple[str, str]) -> Act:
    def act(world: World) -> float:
        for rank in world.ranks:
            world.enter(rank.rank, phase, (*frames, ("train", "train.py")))
        return seconds

    return act


def _one(phase: str, seconds: float, *frames: tuple[str, str]) -> Act:
    def act(world: World) -> float:
        world.wait_for(0)
        world.enter(0, phase, (*frames, ("train", "train.py")))
        return seconds

    return act


def _first_step(world: World) -> float:
    for rank in world.ranks:
        rank.records.clear()
    return _all("forward", 120.0, ("matmul", "model.py"))(world)


def _slow_disk(world: World) -> float:
    """Nothing in the stack is known, but its file grows."""
    seconds = _one("checkpoint", 60.0, ("put", "mystore.py"))(world)
    world.ranks[0].writing = True
    return seconds


def _rewards(world: World) -> float:
    """Nothing in the stack is known, but it changes."""
    world.moved = {0}
    return _one("other", 600.0, ("reward", "mine.py"))(world)


def _sleep(world: World) -> float:
    """One fetches data in an unknown way, the others sleep in a loop until its file is there."""
    for rank in world.ranks:
        world.enter(rank.rank, "other", (("clock_nanosleep", "libc.so.6"), ("train", "train.py")), idle=True)
    return 120.0


SLOW: dict[str, Act] = {
    "evaluation by all": _all("evaluation", 60.0, ("forward", "model.py"), ("evaluate", "train.py")),
    "evaluation by one": _one("evaluation", 60.0, ("forward", "model.py"), ("run_validation", "train.py")),
    "nanoGPT's estimate_loss": _all(
        "evaluation", 60.0, ("estimate_loss", "train.py"), ("decorate_context", "torch/utils/_contextlib.py")
    ),
    "save by rank 0": _one("checkpoint", 60.0, ("_save", "torch/serialization.py"), ("save", "torch/serialization.py")),
    "save of unknown kind": _slow_disk,
    "compile": _all("forward", 90.0, ("compile_fx", "torch/_inductor/compile_fx.py")),
    "garbage collection": _one("backward", 20.0, ("gc_collect_main", "python3.11")),
    "download by one": _one("data", 60.0, ("recv", "socket.py"), ("urlopen", "lib/urllib/request.py")),
    "sleep on purpose": _sleep,
    "rewards computed by one": _rewards,
    "environments in child processes": _all(
        "other", 120.0, ("read", "libc.so.6"), ("Queue.get", "lib/multiprocessing/queues.py")
    ),
    "evaluation nobody can recognise": _one("evaluation", 50.0, ("mix", "mine.py")),
}


@pytest.mark.parametrize("reporting", REPORTERS)
@pytest.mark.parametrize("slow", SLOW)
def test_what_is_slow_is_no_hang(slow: str, reporting: str) -> None:
    """Nobody is killed for work that takes its time, at its first time."""
    world = World(REPORTERS[reporting])
    world.train()
    assert world.pass_time(SLOW[slow](world)) is None
    world.train(3)


@pytest.mark.parametrize("reporting", REPORTERS)
def test_the_first_step_takes_long(reporting: str) -> None:
    """Loading and the first step may take minutes."""
    world = World(REPORTERS[reporting])
    assert world.pass_time(_first_step(world)) is None
    world.train(3)


@pytest.mark.parametrize("reporting", REPORTERS)
def test_steps_of_many_micro_batches(reporting: str) -> None:
    """With 64 micro-batches a step takes half a minute, and some take twice as long."""
    world = World(REPORTERS[reporting])
    world.train(5, step_s=32.0)
    world.train(1, step_s=64.0)
    world.train(2, step_s=32.0)


def _stopped(world: World) -> None:
    world.ranks[2].process = "T"
    world.enter(2, "forward", AT_WORK, idle=True)


def _locked(world: World) -> None:
    world.enter(2, "forward", (("acquire", "threading.py"), ("train", "train.py")), idle=True)


def _in_the_kernel(world: World) -> None:
    world.ranks[2].process = "D"
    world.enter(2, "data", (("read", "dataset.py"),), idle=True)


def _fifo(world: World) -> None:
    world.enter(2, "data", (("open", "dataset.py"),), idle=True)


def _dead_child(world: World) -> None:
    world.enter(2, "forward", (("read", "libc.so.6"), ("Queue.get", "lib/multiprocessing/queues.py")), idle=True)


def _spins(world: World) -> None:
    world.enter(2, "forward", (("spin", "train.py"),))


HUNG: dict[str, Callable[[World], None]] = {
    "stopped": _stopped, "lock": _locked, "in the kernel": _in_the_kernel, "fifo": _fifo,
    "dead child": _dead_child, "endless loop": _spins
}  # fmt: skip

PATIENCE = {"nothing": LIMITS.idle_s, "observed": LIMITS.unannounced_s, "three lines": LIMITS.unannounced_s}


@pytest.mark.parametrize("reporting", REPORTERS)
@pytest.mark.parametrize("hung", HUNG)
def test_what_hangs_is_named(hung: str, reporting: str) -> None:
    """The right rank within the limit and 20 s. A loop that burns CPU time cannot be told from work without a page."""
    world = World(REPORTERS[reporting])
    world.train()
    world.wait_for(2)
    HUNG[hung](world)
    limit = LIMITS.steady_s if hung == "stopped" else PATIENCE.get(reporting, LIMITS.data_s)
    untold = (hung, reporting) == ("endless loop", "nothing")
    assert world.named(limit + 20.0) == (None if untold else 2)


@pytest.mark.parametrize("reporting", ["observed", "adapter"])
def test_waiting_ranks_that_move_excuse_nobody(reporting: str) -> None:
    """A barrier of Python that polls a store moves, and waits all the same."""
    world = World(REPORTERS[reporting])
    world.train()
    for rank in world.ranks:
        world.enter(rank.rank, "backward", IN_COLLECTIVE)
    _locked(world)
    world.moved = {0, 1, 3}
    assert world.named(PATIENCE.get(reporting, LIMITS.data_s) + 20.0) == 2


@pytest.mark.parametrize("reporting", ["observed", "adapter"])
def test_work_without_an_end_is_named(reporting: str) -> None:
    """A loop that never ends looks like work, for a quarter of an hour."""
    world = World(REPORTERS[reporting])
    world.train()
    world.wait_for(2)
    _spins(world)
    world.moved = {2}
    assert world.pass_time(LIMITS.recognised_s - 10.0) is None
    assert world.named(30.0) == 2


@pytest.mark.parametrize("reporting", ["nothing", "observed"])
def test_waiting_ranks_that_burn_cpu_excuse_nobody(reporting: str) -> None:
    """Ranks that wait in NCCL poll: by their stacks they wait, whatever CPU time they use."""
    world = World(REPORTERS[reporting])
    world.train()
    for rank in world.ranks:
        world.enter(rank.rank, "backward", IN_COLLECTIVE)
    _locked(world)
    found = world.pass_time(PATIENCE[reporting] + 20.0)
    assert found is not None
    assert found.rank == 2
    assert "ranks 0, 1, 3 wait in a collective" in found.reason


def test_a_program_that_waits_for_one_at_work_is_left_alone() -> None:
    """Without pages: three ranks wait for hours in a barrier for one that computes."""
    world = World(REPORTERS["nothing"])
    world.wait_for(0)
    world.enter(0, "other", AT_WORK)
    assert world.pass_time(7200.0) is None


def test_nobody_is_blamed_for_having_waited_for_a_rank_that_ended() -> None:
    """The one that all have waited for has ended: the others get their time from then on."""
    world = World(REPORTERS["nothing"])
    world.wait_for(0)
    world.enter(0, "other", AT_WORK)
    assert world.pass_time(1800.0) is None
    del world.ranks[0]
    assert world.pass_time(LIMITS.idle_s - 10.0) is None
    assert world.pass_time(20.0) is not None


HOUR = HangLimits(long_s=LIMITS.idle_s + 100.0)
"""An hour that takes less time to simulate."""

PDB = (
    ("read", "libc.so.6"),
    ("Cmd.cmdloop", "/usr/lib/python3.11/cmd.py"),
    ("Bdb.trace_dispatch", "/usr/lib/python3.11/bdb.py"),
)

EVENT_LOOP = (
    ("epoll_wait", "libc.so.6"), ("EpollSelector.select", "/usr/lib/python3.12/selectors.py"),
    ("BaseEventLoop._run_once", "/usr/lib/python3.12/asyncio/base_events.py"), ("run", "serve.py"),
)  # fmt: skip


@pytest.mark.parametrize("reporting", ["nothing", "observed"])
@pytest.mark.parametrize("frames", [PDB, EVENT_LOOP])
def test_who_waits_for_a_person_or_for_requests_is_left_alone(
    frames: tuple[tuple[str, str], ...], reporting: str
) -> None:
    """For as long as anything may take, also if the others wait for it."""
    world = World(REPORTERS[reporting], limits=HOUR)
    world.train()
    world.wait_for(2)
    world.enter(2, "forward", frames, idle=True)
    assert world.pass_time(HOUR.long_s - 10.0) is None
    assert world.named(30.0) == 2


@pytest.mark.parametrize("reporting", ["nothing", "observed"])
def test_a_file_of_the_program_is_no_debugger(reporting: str) -> None:
    """Whatever its name is."""
    world = World(REPORTERS[reporting])
    world.train()
    world.wait_for(2)
    world.enter(2, "forward", (("acquire", "/home/u/code.py"), ("train", "/home/u/cmd.py")), idle=True)
    assert world.pass_time(LIMITS.idle_s + 20.0) is not None


@pytest.mark.parametrize("reporting", ["nothing", "observed"])
def test_a_rank_in_a_debugger_is_left_alone(reporting: str) -> None:
    """Somebody looks at it with gdb, but may have forgotten it."""
    world = World(REPORTERS[reporting], limits=HOUR)
    world.train()
    world.wait_for(2)
    world.ranks[2].process = TRACED
    world.enter(2, "forward", AT_WORK, idle=True)
    assert world.pass_time(HOUR.long_s - 10.0) is None
    assert world.named(30.0) == 2


@pytest.mark.parametrize("reporting", ["nothing", "observed"])
def test_a_rank_that_a_debugger_has_let_go_has_its_time_again(reporting: str) -> None:
    """It has not moved for ten minutes, and takes some seconds to; so have those that wait for it."""
    world = World(REPORTERS[reporting])
    world.train()
    world.wait_for(2)
    world.ranks[2].process = TRACED
    world.enter(2, "forward", AT_WORK, idle=True)
    assert world.pass_time(LIMITS.idle_s + 30.0) is None
    world.ranks[2].process = "S"
    assert world.pass_time(30.0) is None
    world.train(3)
    world.wait_for(2)
    _locked(world)
    assert world.pass_time(LIMITS.idle_s + 20.0) is not None


def test_idle_limit_can_be_switched_off() -> None:
    """A program that may do nothing for days is never judged by that."""
    world = World(REPORTERS["nothing"], ranks=1)
    world.judge = HangDetector(HangLimits(idle_s=float("inf")))
    world.enter(0, "other", AT_WORK, idle=True)
    assert world.pass_time(3600.0) is None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_more_evidence_of_progress_never_makes_a_hang(data: st.DataObject) -> None:
    """Of two equal worlds, one with later activity, writes or changes of page: it is not hung before the other."""
    reporting = data.draw(st.sampled_from(sorted(REPORTERS)))
    seconds = data.draw(st.floats(1.0, 1200.0))
    less, more = World(REPORTERS[reporting], ranks=1), World(REPORTERS[reporting], ranks=1)
    phase = data.draw(st.sampled_from(["forward", "data", "checkpoint", "evaluation", "collective"]))
    frames = data.draw(st.sampled_from([AT_WORK, IN_COLLECTIVE, (("evaluate", "x.py"),)]))
    for world in (less, more):
        world.train(data.draw(st.just(6)))
        world.enter(0, phase, frames, idle=True)
    kind = data.draw(st.sampled_from(["active", "writing", "changed"]))
    if kind == "active":
        more.ranks[0].idle_since = None
    elif kind == "writing":
        more.ranks[0].writing = True
    else:
        more.pass_time(data.draw(st.floats(0.0, 4.0)))
        more.enter(0, phase, frames, idle=True)
    if less.pass_time(seconds) is None:
        assert more.pass_time(seconds) is None
