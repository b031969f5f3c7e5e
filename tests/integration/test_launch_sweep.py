"""Ending what a generation has left, with real processes below the tests' own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import collect_orphans, descendants, spawn, sweep
from opsd.launch.ranks.ranks import Generation
from opsd.launch.ranks.settings import Program, Settings
from opsd.launch.ranks.shutdown import Teardown
from opsd.launch.ranks.workers import StandbyPool
from opsd.rundir import RunFolders
from opsd.slurm.runner import Output, run_command


def others() -> Callable[[int], bool]:
    """True for the processes that are there already: those of other tests are to be left alone."""
    return frozenset(descendants(os.getpid())).__contains__


def test_a_command_that_a_thread_runs_is_not_swept() -> None:
    """A generation may end while a thread asks Slurm: its command goes on, and the thread gets its exit code."""
    protected, loop = others(), Loop()
    outcome: list[Output | OSError] = []
    deadline = time.monotonic() + 30

    def done(result: Output | OSError) -> None:
        outcome.append(result)
        loop.stop()

    def look() -> None:
        sweep(protected)
        collect_orphans(protected)
        assert time.monotonic() < deadline
        loop.later(0.01, look)

    loop.run_in_thread(lambda: run_command(["sh", "-c", "sleep 0.5; exit 3"], 20.0), done)
    look()
    loop.run()
    assert outcome == [Output(3, "", "")]


def test_what_ranks_have_left_gets_one_sigterm(tmp_path: Path) -> None:
    """A second one would have it drop what it has not written yet."""
    protected, loop = others(), Loop()
    program = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("ready", flush=True)
while not told:
    time.sleep(0.01)
time.sleep(0.3)
print(len(told), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as left:
        assert left.stdout is not None
        assert left.stdout.readline() == "ready\n"
        Teardown(Generation(1), loop, protected, done=loop.stop, stuck=lambda _: None, gracefully=True).advance()
        loop.run()
        assert left.stdout.read() == "1\n"


def test_a_process_that_does_not_end_does_not_hold_up_the_loop() -> None:
    """Its pid stays taken, and the orphans' collection gets it once it has ended."""
    protected = others()
    child = spawn(["sleep", "1000"], env={}, cwd=Path("/"), output=1)
    child.reap(0.05)
    assert Path(f"/proc/{child.pid}").exists()
    child.kill_group()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child.pid}").exists():
        collect_orphans(protected)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_standby_worker_that_was_killed_is_collected_by_the_loop(tmp_path: Path) -> None:
    """Until then it counts as the pool's own, so that no teardown waits for what the kernel may not let go."""
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, sys, time\nos.write(int(sys.argv[3]), b'{{\"ready\": false}}')\n"
        "time.sleep(1000)\n"
    )
    python.chmod(0o755)
    loop = Loop()
    program = Program("script", str(python), (), str(python), tmp_path)
    folders = RunFolders.create("r", folder=tmp_path / "run", logs=None, shared=tmp_path / "shm")
    pool = StandbyPool(Settings(program, "r", "", "n1", 1, "r"), folders, loop)
    pool.stand_by()
    pool.refill()
    (pid,) = pool.pids
    deadline = time.monotonic() + 30

    def look() -> None:
        assert time.monotonic() < deadline
        loop.later(0.01, look if pool.pids else loop.stop)

    look()
    loop.run()
    assert not Path(f"/proc/{pid}").exists()
    pool.close()
