"""Pipelines in processes of their own: killed, full disks, steps that fail. The outputs keep every byte."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.data.array import Arrays
from opsd.data.local import explain
from opsd.data.pipeline import load
from opsd.data.records import Attempt, StageFolder
from opsd.data.run import Run
from opsd.durable import draft_of
from opsd.ledger import beside
from opsd.ledger.beside import DataRun
from opsd.slurm.port import Node
from tests.fakes.clock import until
from tests.fakes.pipelines import PIPELINE, contents, make_pipeline
from tests.fakes.power_loss import Faults
from tests.fakes.slurm import FakeSlurm
from tests.fakes.tree import tmpfs

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

    (tmp_path / "main").mkdir()
    again = run(file, "--beside", str(tmp_path / "main"))
    assert again.returncode == 0, again.stderr
    assert "1 task, 2 are done" in again.stderr
    assert {name: contents(tmp_path / name) for name in ("kept", "final")} == undisturbed
    assert not list(tmp_path.glob(".*.opsd"))
    told = json.loads(
        subprocess.run([*OPSD, "status", str(file), "--json", "-"], capture_output=True, check=True).stdout
    )
    assert [(stage["state"], stage["failed"], stage["lost"]) for stage in told["stages"]] == [
        ("done", 2, 1),
        ("done", 0, 0),
    ]
    assert told["cost"]["core_hours"] > told["cost"]["lost_core_hours"] > 0
    assert beside.read(DataRun, tmp_path / "main") == [DataRun(str(file), 5, 5, **told["cost"])]


FAULTS = """
import ctypes, os, signal

def fault(documents, rank=0, world_size=1):
    yield from documents
    if rank == 0:
        os._exit(0)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        ctypes.string_at(0)
    if rank == 4:
        raise TypeError(f"{object()} has no length")
    if rank == 5:
        raise KeyboardInterrupt
    if rank == 6:
        raise ConnectionError("no answer")
"""


class Jobs(FakeSlurm):
    """A queue that runs a whole array at once when it is submitted; each job has another node than those excluded."""

    def __init__(self) -> None:
        super().__init__([Node(name, "idle") for name in ("n1", "n2", "n3")])

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        told = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        host = next(name for name in self.by_name if name not in told.get("exclude", ""))
        jobs = range(int(told["array"].removeprefix("0-")) + 1)
        environments = [
            {**os.environ, "SLURM_ARRAY_TASK_ID": str(job), "SLURM_JOB_ID": str(job), "SLURMD_NODENAME": host}
            for job in jobs
        ]
        running = [subprocess.Popen(["sh", "-c", script], env=each, stderr=subprocess.DEVNULL) for each in environments]
        assert all(process.wait(60) in (exitcodes.OK, exitcodes.FAILED) for process in running)
        return 1


def test_what_would_come_again_is_tried_twice(tmp_path: Path) -> None:
    """An exception of the pipeline, or a process that ends by itself; the network may be better next time."""
    text = FAULTS + PIPELINE.replace("LambdaFilter(is_long)", "fault, LambdaFilter(is_long)").replace("=3", "=7")
    ended = run(make_pipeline(tmp_path, text), "--workers", "3", "--retries", "2")
    assert (ended.returncode, "6 tasks not done" in ended.stderr) == (exitcodes.FAILED, True), ended.stderr
    ranks = Counter(attempt.rank for attempt in StageFolder(tmp_path / "pipeline", 1).attempts())
    assert ranks == {0: 2, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 3}
    assert ended.stderr.count("(twice in a row, so it was not tried again)") == 5
    assert ("SIGSEGV (twice" in ended.stderr, "exit code 0 (twice" in ended.stderr) == (True, True)


def test_a_job_whose_process_ends_by_itself_on_two_nodes_is_given_up(tmp_path: Path) -> None:
    """As on one machine; the other task of the same job is done all the same."""
    text = FAULTS + PIPELINE.replace("LambdaFilter(is_long)", "fault, LambdaFilter(is_long)").replace("=3", "=4")
    file, said = make_pipeline(tmp_path, text), list[str]()
    root = file.with_suffix("")
    engine = Arrays(root, Jobs(), said.append, per_job=2, opsd=OPSD[:-1], sleep=lambda _: None)
    assert not Run(file, root, load(file), engine, said.append).run()
    found = StageFolder(root, 1).attempts()
    assert sorted((attempt.rank, attempt.host) for attempt in found) == [
        (0, "n1"), (0, "n2"), (1, "n1"), (2, "n1"), (2, "n2"), (3, "n1"), (3, "n2"),
    ]  # fmt: skip
    assert {attempt.error for attempt in found} == {"", "exit code 0", "signal SIGKILL", "signal SIGSEGV"}
    assert said[-1].count("(twice in a row, so it was not tried again)") == 3


@pytest.mark.parametrize(
    ("code", "short", "outcome", "why"),
    [
        (1, True, "failed", "its process ended with exit code 1"),
        (-signal.SIGKILL, False, "failed", "its process ended with signal SIGKILL"),
        (-signal.SIGSEGV, True, "failed", "its process ended with signal SIGSEGV"),
        (-signal.SIGKILL, True, "", "its process was killed when memory was short"),
    ],
)
def test_only_the_kernel_explains_the_end_of_a_process(code: int, short: bool, outcome: str, why: str) -> None:
    """Slurm would have ended this one too. What is not explained is an error that may come again."""
    explain(attempt := Attempt(1), code, short)
    assert (attempt.outcome, attempt.why.partition(";")[0]) == (outcome, why)
    assert bool(attempt.error) == bool(outcome)


def test_the_folder_of_the_main_run_is_looked_for_first(tmp_path: Path) -> None:
    """Before a task runs; it is not created, as its name may be wrong."""
    ended = run(make_pipeline(tmp_path), "--beside", str(tmp_path / "main"))
    assert (ended.returncode, ended.stderr.count("\n")) == (exitcodes.USAGE, 1), ended.stderr
    assert "create it, or name the folder of the run" in ended.stderr
    assert not (tmp_path / "kept").exists() and not (tmp_path / "main").exists()


def test_killed_attempts_leave_no_drafts(tmp_path: Path) -> None:
    """Killed while one writes that it began, another one its record, and the command the record of an array."""
    file = make_pipeline(tmp_path)
    root = tmp_path / "pipeline"
    for calls, place in (("rename", "attempts"), ("link", "tasks")):
        faults = Faults(root / "stage-01" / place, "opsd.data.worker", calls, first=1, kill=True)
        subprocess.run(
            [*OPSD, "run", str(file), "--retries", "0"], env={**os.environ, **faults.environment}, check=False
        )
    (root / "stage-01/arrays").mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-c", f"from opsd.durable import *; draft_of(Path('{root}/stage-01/arrays/1.json')).touch()"],
        check=True,
    )
    (living := draft_of(root / "stage-01/arrays/2.json")).touch()
    assert run(file).returncode == 0
    assert list(root.rglob("*.draft")) == list(root.rglob(living.name)) != []


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
