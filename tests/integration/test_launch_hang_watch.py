"""Taking stacks of real processes, and the watch over hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.client import process_start
from opsd.launch.hangs.capture import StackCapture, Target, find_py_spy
from opsd.launch.hangs.hang import Hang
from opsd.launch.hangs.limits import HangLimits
from opsd.launch.hangs.watch import HangWatch
from opsd.launch.io.console import RankOutput
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import Child
from opsd.launch.ranks.ranks import Generation, Rank
from opsd.rank_page import RankPage
from opsd.rundir import RunFolders
from tests.fakes.ranks import FakeRank

# The watch over hangs on real processes, with a py-spy that counts how often it is asked.


STACK = [{"pid": 1, "os_thread_id": 1, "thread_name": "MainThread", "active": True, "owns_gil": False,
          "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 7}]}]  # fmt: skip


class Stalled:
    """Ranks that do not move any more, watched on a loop."""

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        self.examined = False
        self._asked = folder / "asked"
        self._asked.touch()
        self._py_spy = folder / "py-spy"
        self.stack(json.dumps(STACK))
        folders = RunFolders.create("r", folder=folder / "run", logs=None, shared=folder / "shm")
        self._loop = Loop()
        self.gpu_probe = folder / "gpu_probe"
        self.says("[]")
        limits = HangLimits(startup_s=2.0)
        self.watch = HangWatch(limits, folders, self._loop, str(self._py_spy), gpu_probe=[str(self.gpu_probe)])
        self.generation = Generation(1, [self._rank(number, folder, cleanup) for number in range(2)])
        self.ranks = [FakeRank(rank.rank, since=time.monotonic()) for rank in self.generation.ranks]
        cleanup.callback(self.watch.reset)

    def _rank(self, number: int, folder: Path, cleanup: ExitStack) -> Rank:
        process = subprocess.Popen(["sleep", "1000"])
        child = Child(process)
        cleanup.callback(child.reap)
        cleanup.callback(process.kill)
        ours, theirs = socket.socketpair()
        cleanup.callback(ours.close)
        cleanup.callback(theirs.close)
        files = (folder / "log", folder / "error", folder / "page")
        return Rank(number, number, child, ours, RankOutput(number), *files, warm=False)

    def stack(self, text: str) -> None:
        """What py-spy prints from now on."""
        self._py_spy.write_text(f"#!/bin/sh\necho \"$@\" >> {self._asked}\necho '{text}'\n")
        self._py_spy.chmod(0o755)

    def says(self, uses: str, after_s: int = 0) -> None:
        """What the probe of GPUs prints; ``$1`` and ``$2`` are the processes of the ranks."""
        self.gpu_probe.write_text(f"#!/bin/sh\nsleep {after_s}\ncat <<END\n{uses}\nEND\n")
        self.gpu_probe.chmod(0o755)

    @property
    def dumps(self) -> int:
        """How often stacks were taken."""
        return len(self._asked.read_text().splitlines())

    def _pages(self) -> dict[int, RankPage]:
        pids = {rank.rank: rank.child.pid for rank in self.generation.ranks}
        return {
            rank.rank: replace(rank.page, pid=pids[rank.rank], pid_start=process_start(pids[rank.rank]) or 0)
            for rank in self.ranks
        }

    def move(self) -> None:
        """All ranks change their phase."""
        for rank in self.ranks:
            rank.enter("data", time.monotonic())

    def look(self, enough: Callable[[list[Hang]], bool]) -> list[Hang]:
        """Look at a launcher's pace, without ending the ranks, until ``enough`` was seen."""
        seen: list[Hang] = []
        deadline = time.monotonic() + 30

        def poll() -> None:
            hang = self.watch.look(self.generation, self._pages())
            self.examined = self.examined or self.watch.examining
            seen.extend([] if hang is None else [hang])
            assert time.monotonic() < deadline, seen
            self._loop.later(0.05, self._loop.stop if enough(seen) else poll)

        poll()
        self._loop.run()
        return seen


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Stalled]:
    """Two ranks that stand still, with a limit of two seconds."""
    with ExitStack() as cleanup:
        yield Stalled(tmp_path, cleanup)


def test_stacks_are_taken_once_while_a_hang_lasts(stalled: Stalled) -> None:
    """A hang that the leader lets last keeps the stacks taken first: no further dumps, and the file stays as it was."""
    hangs = stalled.look(lambda seen: len(seen) == 10)
    assert stalled.dumps == 2 * len(stalled.ranks)
    assert all("all_reduce" in rank.where for hang in hangs for rank in hang.ranks)
    (file,) = {hang.stacks for hang in hangs}
    assert file is not None
    assert Path(file).read_text().count("all_reduce") == len(stalled.ranks)
    assert stalled.watch.write_stacks(stalled.generation) == file
    assert not stalled.watch.suspicious


def test_a_hang_waits_for_what_the_gpus_do(stalled: Stalled) -> None:
    """All stacks look alike; no kernel runs on the GPU of rank 1, and that of rank 0 waits for it."""
    stalled.stack("[]")
    known = [("$1", "spins", 100), ("$2", "idle", 0)]
    uses = [{"pid": pid, "gpus": [1], "state": state, "kernels": kernels, "work": 0} for pid, state, kernels in known]
    stalled.says(json.dumps(uses), after_s=2)
    (hang,) = stalled.look(lambda seen: len(seen) == 1)
    assert stalled.examined
    assert not stalled.watch.examining
    assert hang.rank == 1
    assert "GPU 1 runs no kernel" in hang.evidence


def test_stacks_of_ranks_that_moved_are_taken_again(stalled: Stalled) -> None:
    """Ranks that went on and hang somewhere else have new stacks."""

    def hung_again(seen: list[Hang]) -> bool:
        if seen and stalled.ranks[0].phase == "setup":
            stalled.move()
        return bool(seen) and seen[-1].phase == "data"

    stalled.look(hung_again)
    assert stalled.dumps == 4 * len(stalled.ranks)


# Taking stacks of real processes: running, stopped, gone, and without py-spy.


PROGRAM = """
import faulthandler, signal, sys, time
if "handler" in sys.argv:
    faulthandler.register(signal.SIGRTMIN + 8, all_threads=True)
def deep_inside():
    print("ready", flush=True)
    time.sleep(1000)
deep_inside()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[int, Path]]]:
    """Starts a process that sleeps in ``deep_inside``; its pid and its output."""
    processes = []

    def starter(*args: str, file: Path | None = None) -> tuple[int, Path]:
        log = tmp_path / f"{len(processes)}.log"
        with log.open("wb") as output:
            command = [sys.executable, *(["-c", PROGRAM] if file is None else [str(file)]), *args]
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 30
        while "ready" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return processes[-1].pid, log

    yield starter
    for process in processes:
        process.kill()
        process.wait()


def finish(capture: StackCapture, loop: Loop) -> None:
    """Serve the loop until no py-spy runs any more."""

    def check() -> None:
        if capture.pids:
            loop.later(0.02, check)
        else:
            loop.stop()

    capture.start()
    loop.later(0.02, check)
    loop.run()


def test_running_and_stopped_processes(start: Callable[..., tuple[int, Path]], tmp_path: Path) -> None:
    """All stacks are there, native frames where the process can be traced, and a process that is gone has none."""
    (running, log), (stopped, _) = start(), start()
    os.kill(stopped, signal.SIGSTOP)
    gone = subprocess.Popen(["true"])
    gone.wait()
    loop = Loop()
    targets = (
        Target(0, running, stopped=False, fallback=log),
        Target(1, stopped, stopped=True, fallback=log),
        Target(2, gone.pid, stopped=False, fallback=log),
    )
    capture = StackCapture(targets, loop, find_py_spy())
    finish(capture, loop)
    assert not capture.awaited(0.0)
    assert sorted(capture.stacks) == [0, 1]
    assert any(frame.name == "deep_inside" for frame in capture.stacks[0].main)
    assert any("sleep" in frame.name for frame in capture.stacks[0].main)
    assert any(frame.name == "deep_inside" for frame in capture.stacks[1].main)
    text = capture.text()
    assert f"rank 1 (pid {stopped}, stopped)" in text
    assert "rank 2" in text
    assert str(log) in text


def test_capture_can_be_dropped(start: Callable[..., tuple[int, Path]]) -> None:
    """Dropping a capture leaves no py-spy behind and the process as it was."""
    pid, log = start()
    capture = StackCapture((Target(0, pid, stopped=False, fallback=log),), Loop(), find_py_spy())
    capture.start()
    assert capture.awaited(0.0), "a verdict waits for the first stacks,"
    assert not capture.awaited(60.0), "but not for ever"
    (py_spy,) = capture.pids
    capture.close()
    assert not Path(f"/proc/{py_spy}").exists()
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


WORKS = """
import threading, time
def reward(depth): return reward(depth - 1) if depth else sum(each for each in range(3000))
def work():
    while True:
        for depth in range(30): reward(depth)
def begin():
    print("ready", flush=True)
"""


@pytest.mark.parametrize(
    ("code", "moved"),
    [
        ("begin(); work()", True),
        ("thread = threading.Thread(target=work, daemon=True); thread.start(); begin(); thread.join()", True),
        ("threading.Thread(target=work, daemon=True).start(); begin(); time.sleep(1000)", False),
        ("begin(); import re; re.match('(a+)+$', 'a' * 60 + 'b')", False),
        ("begin(); threading.Event().wait()", False),
    ],
)
def test_work_is_told_from_waiting(
    start: Callable[..., tuple[int, Path]], tmp_path: Path, code: str, *, moved: bool
) -> None:
    """By stacks that change: of the main thread, or of one that it waits for."""
    file = tmp_path / "works.py"
    file.write_text(WORKS + code)
    pid, log = start(file=file)
    loop = Loop()
    capture = StackCapture((Target(0, pid, stopped=False, fallback=log),), loop, find_py_spy())
    finish(capture, loop)
    assert not capture.awaited(0.0)
    assert (0 in capture.moved) == moved


def test_without_py_spy_the_rank_writes_its_own_stack(start: Callable[..., tuple[int, Path]]) -> None:
    """A rank with a handler is asked; one without is left alone, since the signal would kill it."""
    (able, log), (unable, _) = start("handler"), start()
    targets = (Target(0, able, stopped=False, fallback=log), Target(1, unable, stopped=False, fallback=log))
    capture = StackCapture(targets, Loop(), None)
    capture.start()
    capture.ask_ranks()
    assert "deep_inside" in log.read_text()
    assert Path(f"/proc/{unable}").exists()
