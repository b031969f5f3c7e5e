"""The watch over hangs on real processes, with a py-spy that counts how often it is asked."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.client import process_start
from opsd.launch.hangs.culprit import Hang
from opsd.launch.hangs.limits import HangLimits
from opsd.launch.hangs.watch import HangWatch
from opsd.launch.io.console import RankOutput
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import Child
from opsd.launch.ranks.ranks import Generation, Rank
from opsd.rank_page import RankPage
from opsd.rundir import RunFolders
from tests.fakes.ranks import FakeRank

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
