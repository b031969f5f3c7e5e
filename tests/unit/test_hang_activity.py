"""Whether a rank's processes do anything, from proc(5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.launch.hangs.activity import BUSY_SHARE, MOVED_BYTES, Activity, ActivityTracker, Usage, compare, read_usage
from tests.fakes.clock import eventually

IDLE = Usage(10.0, 1000, 500, frozenset({7, 8}))


def test_a_process_that_does_nothing_is_idle_since_it_did_something() -> None:
    """Threads that poll a little are nothing."""
    usages = [IDLE, replace(IDLE, cpu_s=11.0), replace(IDLE, cpu_s=11.02), replace(IDLE, cpu_s=11.04)]
    tracker = ActivityTracker(2.0, read=lambda pid: usages.pop(0))
    assert [tracker.look(7, now).active for now in (0.0, 1.0, 2.0, 4.0, 6.0)] == [0.0, 0.0, 2.0, 2.0, 2.0]


def test_what_cannot_be_read_counts_as_active() -> None:
    """Nobody is killed for what is not seen."""
    assert compare(IDLE, None, 2.0, Activity(0.0, 0.0), 9.0).active == 9.0
    assert compare(None, IDLE, 2.0, Activity(0.0, 0.0), 9.0).active == 9.0


def test_processes_that_come_and_go_are_activity() -> None:
    """A program that starts others is at work, even if those end between two looks."""
    assert compare(IDLE, replace(IDLE, pids=frozenset({7, 9})), 2.0, Activity(0.0, 0.0), 9.0).active == 9.0


def test_a_stopped_child_counts_if_nothing_else_moves() -> None:
    """``bash train.sh`` whose Python is stopped does not go on."""
    stopped = replace(IDLE, stopped=frozenset({8}))
    assert compare(IDLE, stopped, 2.0, Activity(0.0, 0.0), 9.0).stopped_child == 8
    assert compare(IDLE, replace(stopped, cpu_s=12.0), 2.0, Activity(0.0, 0.0), 9.0).stopped_child is None


@given(st.floats(0, 2), st.integers(0, 1 << 24), st.floats(0, 2), st.integers(0, 1 << 24))
def test_more_work_is_never_less_activity(cpu_s: float, moved: int, more_cpu_s: float, more_moved: int) -> None:
    """Whatever is used more, the rank does not count as idle for longer."""
    usage = replace(IDLE, cpu_s=IDLE.cpu_s + cpu_s, moved=IDLE.moved + moved)
    more = replace(usage, cpu_s=usage.cpu_s + more_cpu_s, moved=usage.moved + more_moved)
    before = Activity(0.0, 0.0)
    assert compare(IDLE, more, 2.0, before, 9.0).active >= compare(IDLE, usage, 2.0, before, 9.0).active


def test_a_tree_of_processes_is_read(tmp_path: Path) -> None:
    """CPU time, bytes and state of a program and of what it has started."""
    child = "import time, sys; x = bytearray(1 << 22); open(sys.argv[1], 'wb').write(x); time.sleep(100)"
    source = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-c", source, str(tmp_path / "x")], start_new_session=True)
    try:
        assert eventually(lambda: (usage := read_usage(process.pid)) is not None and usage.written >= 1 << 22, 30)
        usage = read_usage(process.pid)
        assert usage is not None
        assert len(usage.pids) == 2
        assert usage.cpu_s > 0
        (grandchild,) = usage.pids - {process.pid}
        os.kill(grandchild, signal.SIGSTOP)
        assert eventually(lambda: read_usage(process.pid).stopped == {grandchild}, 10)  # type: ignore[union-attr]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert read_usage(process.pid) is None


def test_thresholds_are_those_of_helper_threads() -> None:
    """NCCL's watchdog wakes ten times a second and uses less; any training uses more."""
    still = replace(IDLE, cpu_s=IDLE.cpu_s + BUSY_SHARE * 2.0 * 0.9, moved=IDLE.moved + MOVED_BYTES - 1)
    assert compare(IDLE, still, 2.0, Activity(0.0, 0.0), 9.0).active == 0.0


def test_a_trickle_is_work_if_the_main_thread_takes_part() -> None:
    """A pipe with some lines a second is; a thread that logs while the main thread waits for a lock is not."""
    before = replace(IDLE, main={7: (50, 1000), 8: (5, 0)})

    def active(waits: int, moved: int) -> bool:
        after = replace(before, main={7: (50 + waits, 1000 + moved), 8: (5, 0)})
        return compare(before, after, 2.0, Activity(0.0, 0.0), 9.0).active == 9.0

    assert active(waits=2, moved=20)
    assert not active(waits=0, moved=20)
    assert not active(waits=2, moved=0), "a loop that polls"


TRICKLE = """
import os, sys, threading, time
r, w = os.pipe()
def write():
    while True:
        os.write(w, b"x")
        time.sleep(0.1)
if sys.argv[1] == "read":
    os.fork() or write()
    while True:
        os.read(r, 1)
threading.Thread(target=write).start()
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


@pytest.mark.parametrize(("what", "active"), [("read", True), ("lock", False)])
def test_a_main_thread_that_reads_a_byte_at_a_time(what: str, *, active: bool) -> None:
    """As the kernel counts it."""
    process = subprocess.Popen([sys.executable, "-c", TRICKLE, what], start_new_session=True)
    try:
        assert eventually(lambda: _moves(process.pid), 60)
        before = read_usage(process.pid)
        time.sleep(0.5)
        found = compare(before, read_usage(process.pid), 2.0, Activity(0.0, 0.0), 9.0)
        assert found.active == (9.0 if active else 0.0)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _moves(pid: int) -> bool:
    """Whether it has done with its imports and moves bytes."""
    before = read_usage(pid)
    time.sleep(0.3)
    after = read_usage(pid)
    if before is None or after is None:
        return False
    return after.cpu_s - before.cpu_s < 0.02 and after.moved > before.moved and after.pids == before.pids
