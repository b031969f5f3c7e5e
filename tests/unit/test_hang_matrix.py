"""The judge of hangs on programs that report much, little or nothing: all that is slow, and all that hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.attribution import TRACED
from opsd.launch.hangs.hang import HangDetector
from opsd.launch.hangs.limits import HangLimits
from tests.fakes.hang_world import AT_WORK, IN_COLLECTIVE, LIMITS, REPORTERS, World

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
