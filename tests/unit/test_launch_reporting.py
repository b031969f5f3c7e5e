"""What the launcher says and writes never holds it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from opsd.launch.io.reporting import EventLog, WorkQueue, flush_all
from opsd.launch.io.run_log import RunLog
from tests.fakes.clock import until


def test_work_is_done_in_order() -> None:
    """What is put first is done first, and ``flush`` waits for all of it."""
    done: list[int] = []
    work = WorkQueue("test")
    for number in range(100):
        work.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert work.flush(10)
    assert done == list(range(100))


def test_work_that_hangs_holds_up_nobody() -> None:
    """While one piece of work hangs, more is taken up to the limit; the rest is counted and told once it goes on."""
    hung, done, missed = threading.Event(), [], []
    work = WorkQueue("test", limit=5, missed=missed.append)
    began = threading.Event()
    work.put(lambda: (began.set(), hung.wait(30))[0])
    began.wait(10)
    for number in range(12):
        work.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not work.flush(0.05)
    assert "test" in flush_all(0.05)
    hung.set()
    assert work.flush(10)
    assert done == [0, 1, 2, 3, 4]
    assert missed == [7]


def test_event_file_that_hangs_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """A fifo that nobody reads stands for a file server that hangs."""
    os.mkfifo(tmp_path / "hangs")
    reader = os.open(tmp_path / "hangs", os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog("r", "n", [tmp_path / "hangs", tmp_path / "good"])
    for number in range(200):
        log.emit("resumed", step=number, text="x" * 1000)
    until(lambda: (tmp_path / "good").read_bytes().count(b"\n") == 200)
    os.close(reader)


def test_run_log_is_read_and_written_in_a_thread(tmp_path: Path) -> None:
    """A leader notes what leaders before it have written before it adds to it, in order, in a thread."""
    path = tmp_path / "events.jsonl"
    RunLog("r", "n1", path).relay({"event": "checkpoint_committed", "generation": 1, "step": 5}, 0.0)
    work = WorkQueue("run log")
    log = RunLog("r", "n2", path, work)
    log.relay({"event": "checkpoint_committed", "generation": 1, "step": 5}, 0.0)
    log.relay({"event": "checkpoint_committed", "generation": 1, "step": 6}, 0.0)
    log.emit("node_lost", lost="n1")
    assert work.flush(10)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["event"], record.get("step")) for record in records] == [
        ("checkpoint_committed", 5), ("checkpoint_committed", 6), ("node_lost", None),
    ]  # fmt: skip


def test_full_stderr_holds_up_nothing() -> None:
    """A program that says more than the pipe takes, to a reader that stands still, goes on and ends."""
    code = (
        "import sys\n"
        "from opsd.launch.io.reporting import print_message\n"
        "for number in range(5000):\n    print_message(f'{number} ' + 'x' * 100)\n"
        "print('done', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert process.wait(20) == 0


def test_what_was_not_shown_is_counted() -> None:
    """Once the reader goes on, it is told how many messages it has missed; those before are whole and in order."""
    code = (
        "import sys, time\n"
        "from opsd.launch.io import reporting\n"
        "for number in range(6000):\n    reporting.print_message(f'{number} ' + 'x' * 100)\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
        "reporting.flush(20)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        _, err = process.communicate(timeout=60)
    lines = err.decode().splitlines()
    told = [int(line.split()[1]) for line in lines if "are not shown" in line]
    shown = [int(line.split()[1]) for line in lines if "are not shown" not in line]
    assert sum(told) > 0
    assert len(shown) + sum(told) == 6000
    assert shown == sorted(set(shown))
