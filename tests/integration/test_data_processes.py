"""Pipelines in processes of their own: killed, full disks, steps that fail. The outputs keep every byte."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.data.records import StageFolder
from opsd.ledger import beside
from opsd.ledger.beside import DataRun
from tests.fakes.clock import until
from tests.fakes.pipelines import PIPELINE, contents, make_pipeline
from tests.fakes.tmpfs import tmpfs

OPSD = [sys.executable, "-m", "opsd", "data"]
TROUBLE = """
import errno, os, signal
from pathlib import Path

def trouble(documents, rank=0, world_size=1):
    once = Path("FOLDER/once-" + str(rank))
    for number, document in enumerate(documents):
        if number == 9 and not Path("FOLDER/calm").exists() and not once.exists():
            once.write_text(str(os.getpid()))
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                raise ValueError("no such luck")
            while True:
                signal.pause()
        yield document
"""
DISTURBED = TROUBLE + PIPELINE.replace("LambdaFilter(is_long)", "trouble, LambdaFilter(is_long)")


def run(file: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """``opsd data run`` of the pipeline."""
    return subprocess.run([*OPSD, "run", str(file), *more], capture_output=True, text=True, check=False, timeout=120)


def test_killed_failing_and_interrupted_tasks_change_no_byte(tmp_path: Path) -> None:
    """One process is killed, one task fails, one hangs until the whole command is killed; the command goes on."""
    file = make_pipeline(tmp_path, DISTURBED)
    (tmp_path / "calm").touch()
    calm = run(file)
    assert (calm.returncode, calm.stdout.count("done")) == (0, 2), calm.stderr
    undisturbed = {name: contents(tmp_path / name) for name in ("kept", "final")}
    for name in ("kept", "final", "pipeline"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "calm").unlink()

    command = subprocess.Popen([*OPSD, "run", str(file), "--workers", "3"], stderr=subprocess.PIPE, text=True)
    until(lambda: len(list((tmp_path / "kept").glob("*.jsonl.gz"))) == 2)
    stuck = int((tmp_path / "once-2").read_text())
    command.kill()
    _, said = command.communicate()
    assert "task 0 on" in said
    assert "signal SIGKILL" in said
    assert "task 1 on" in said
    assert "ValueError: no such luck" in said
    until(lambda: not Path(f"/proc/{stuck}").exists())
    assert contents(tmp_path / "kept").keys() == {"00000.jsonl.gz", "00001.jsonl.gz"}

    again = run(file, "--beside", str(tmp_path / "main"))
    assert again.returncode == 0, again.stderr
    assert "1 task, 2 are done" in again.stderr
    assert {name: contents(tmp_path / name) for name in ("kept", "final")} == undisturbed
    assert not list(tmp_path.glob(".*.opsd"))
    told = json.loads(
        subprocess.run([*OPSD, "status", str(file), "--json", "-"], capture_output=True, check=True).stdout
    )
    assert [(stage["state"], stage["failed"], stage["lost"]) for stage in told["stages"]] == [
        ("done", 1, 2),
        ("done", 0, 0),
    ]
    assert told["cost"]["core_hours"] > told["cost"]["lost_core_hours"] > 0
    assert beside.read(DataRun, tmp_path / "main") == [DataRun(str(file), 5, 5, **told["cost"])]


FAULTS = """
import ctypes, os

def fault(documents, rank=0, world_size=1):
    yield from documents
    if rank == 0:
        raise TypeError(f"{object()} has no length")
    if rank == 1:
        os._exit(0)
    if rank == 2:
        raise KeyboardInterrupt
    if rank == 3:
        ctypes.string_at(0)
    if rank == 4:
        raise ConnectionError("no answer")
"""


def test_what_would_come_again_is_tried_twice(tmp_path: Path) -> None:
    """An exception of the pipeline, or a process that ends itself; a crash or the network may be better next time."""
    text = FAULTS + PIPELINE.replace("LambdaFilter(is_long)", "fault, LambdaFilter(is_long)").replace("=3", "=6")
    ended = run(make_pipeline(tmp_path, text), "--workers", "3", "--retries", "2")
    assert (ended.returncode, "5 tasks not done" in ended.stderr) == (exitcodes.FAILED, True), ended.stderr
    ranks = Counter(attempt.rank for attempt in StageFolder(tmp_path / "pipeline", 1).attempts())
    assert ranks == {0: 2, 1: 2, 2: 2, 3: 3, 4: 3, 5: 1}
    assert ended.stderr.count("(twice in a row, so it was not tried again)") == 3
    assert ("SIGSEGV" in ended.stderr, "exit code 0 (twice" in ended.stderr) == (True, True)


def test_a_full_disk_is_told_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """The next stage has not seen half of a file."""
    with tmpfs(tmp_path / "disk", "size=400k") as disk:
        file = make_pipeline(tmp_path, PIPELINE.replace("FOLDER/kept", f"{disk}/kept").replace(".jsonl.gz", ".jsonl"))
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file_:
            while True:
                file_.write(b"x" * 4096)
        full = run(file, "--retries", "1")
        assert full.returncode == exitcodes.NO_SPACE
        assert "kept: No space left on device" in full.stderr
        assert "make room there" in full.stderr
        assert not list((disk / "kept").glob("*")) if (disk / "kept").exists() else True
        filler.unlink()
        assert run(file).returncode == 0
        assert len(contents(disk / "kept")) == 3


@pytest.mark.parametrize("words", [("run", "none.py"), ("status", "none.py")])
def test_what_is_not_there_is_told(tmp_path: Path, words: tuple[str, ...]) -> None:
    """With exit code 2 and one sentence."""
    ended = subprocess.run([*OPSD, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)


def test_interrupted_by_the_user(tmp_path: Path) -> None:
    """Exit code 3, and no process is left."""
    file = make_pipeline(tmp_path, DISTURBED)
    command = subprocess.Popen([*OPSD, "run", str(file), "--workers", "3"], stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "once-2").exists())
    until(lambda: (tmp_path / "once-2").read_text())
    stuck = int((tmp_path / "once-2").read_text())
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 3
    assert "the same command goes on" in said
    with pytest.raises(ProcessLookupError):
        os.kill(stuck, 0)
