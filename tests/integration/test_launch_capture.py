"""Taking stacks of real processes: running, stopped, gone, and without py-spy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opsd.launch.hangs.capture import StackCapture, Target, find_py_spy
from opsd.launch.io.loop import Loop

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
