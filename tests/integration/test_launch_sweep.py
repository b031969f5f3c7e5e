"""Ending what a generation has left, with real processes below the tests' own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from opsd.launch.aside import aside
from opsd.launch.loop import Loop
from opsd.launch.process import collect_orphans, descendants, sweep
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

    aside(loop, lambda: run_command(["sh", "-c", "sleep 0.5; exit 3"], 20.0), done)
    look()
    loop.run()
    assert outcome == [Output(3, "", "")]
