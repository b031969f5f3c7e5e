"""The jobs of a study: each cell has one, and never more run at once than asked."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.ablate.cells import cells_of, demand_origin, look, metric_of, prepare
from opsd.ablate.run import jobs_of, opsd_command, spare_partition, stop, submit
from opsd.ablate.study import StudyError
from opsd.slurm.port import Job, Partition, SlurmUnavailable
from tests.fakes.slurm import FakeSlurm
from tests.fakes.studies import end_cell, make_study, study_and_cells


class Queue(FakeSlurm):
    """A queue whose jobs start once the job that they wait for has ended. It dies after ``patience`` jobs."""

    def __init__(self, patience: int = 1000) -> None:
        super().__init__([])
        self.after: dict[int, int] = {}
        self.submitted: list[str] = []
        self.options: list[Sequence[str]] = []
        self.patience = patience

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        if not self.patience:
            raise SlurmUnavailable("slurmctld does not answer")
        self.patience -= 1
        told = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        number = 100 + len(self.submitted)
        if "dependency" in told:
            *lane, singleton = told["dependency"].split(",")
            assert singleton == "singleton"
            for word in lane:
                self.after[number] = int(word.removeprefix("afterany:"))
        self.submitted.append(told["job-name"])
        self.options.append(options)
        self.scripts[number] = script
        self._jobs.append(Job(number, "pending", "", "u", "p", (), "", None, None, None, 0, told["job-name"]))
        return number

    def cancel(self, job: int) -> None:
        self._jobs = [each for each in self._jobs if each.id != job]

    @property
    def able(self) -> list[int]:
        """The jobs that run, if there is room for all."""
        live = {job.id for job in self._jobs}
        return [job for job in sorted(live) if self.after.get(job) not in live]

    def set_state(self, job: int, state: str) -> None:
        self._jobs = [replace(each, state=state) if each.id == job else each for each in self._jobs]


def sent(tmp_path: Path, queue: Queue) -> list[int]:
    _, cells = study_and_cells(make_study(tmp_path))
    return submit(tmp_path / "study", cells, queue, partition="p", limit=2, ranks=1)


def test_each_cell_has_one_job(tmp_path: Path) -> None:
    """Whether its job waits or runs: submitted again, the study adds none."""
    queue = Queue()
    assert len(sent(tmp_path, queue)) == 6
    queue.set_state(100, "running")
    queue.set_state(101, "completing")
    assert sent(tmp_path, queue) == []
    assert len(set(queue.submitted)) == 6


def test_a_submitter_that_dies_is_continued(tmp_path: Path) -> None:
    """After each job, any number of times."""
    queue = Queue(patience=1)
    for _ in range(5):
        with pytest.raises(SlurmUnavailable):
            sent(tmp_path, queue)
        queue.patience = 1
    assert sent(tmp_path, queue) == [105]
    assert len(queue.submitted) == len(set(queue.submitted)) == 6


def test_the_same_study_in_another_folder_has_jobs_of_its_own(tmp_path: Path) -> None:
    """As the sentence about other code advises."""
    queue = Queue()
    study, cells = study_and_cells(make_study(tmp_path))
    elsewhere = cells_of(study, tmp_path / "again")
    for each in (cells, elsewhere):
        assert len(submit(each[0].folder.parents[1], each, queue, partition="p", limit=2, ranks=1)) == 6
    assert set(jobs_of(elsewhere, queue)) == {cell.name for cell in cells}
    assert len(stop(cells, queue)) == 6 and len(jobs_of(elsewhere, queue)) == 6


def test_what_is_done_gets_no_job(tmp_path: Path) -> None:
    """A cell that failed or was stopped does."""
    _, cells = study_and_cells(make_study(tmp_path))
    for cell, code in zip(cells, (0, 1, 75), strict=False):
        end_cell(cell, steps=20 if not code else 3, code=code)
    queue = Queue()
    sent(tmp_path, queue)
    assert queue.submitted == [cell.run_name for cell in cells[1:]]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(10))
def test_no_more_run_at_once_than_asked(tmp_path: Path, limit: int, seed: int) -> None:
    """In any order of ends, cancels and submitters that die; and as many run as can while jobs wait."""
    rng, queue = random.Random(seed), Queue()
    path = make_study(tmp_path)
    path.write_text(path.read_text().replace("seeds = 3", "seeds = 12"))
    _, cells = study_and_cells(path)
    for _ in range(60):
        if rng.random() < 0.3 and queue.able:
            queue.cancel(rng.choice(queue.able))
            continue
        queue.patience = rng.randint(0, 3)
        with suppress(SlurmUnavailable):
            submit(tmp_path / "study", cells, queue, partition="p", limit=limit, ranks=1)
        assert len(queue.able) <= limit
    assert queue.able


def test_only_the_jobs_of_the_study_are_cancelled(tmp_path: Path) -> None:
    """Other jobs of the user stay, also those with a similar name."""
    queue = Queue()
    sent(tmp_path, queue)
    _, cells = study_and_cells(make_study(tmp_path))
    others = [
        Job(7, "running", "", "u", "p", (), "", None, None, None, 0, name)
        for name in ("train", cells[0].name, cells[0].run_name[:-1])
    ]
    queue._jobs += others
    assert stop(cells, queue) == list(range(100, 106))
    assert queue.jobs() == others
    assert jobs_of(cells, queue) == {}


def test_a_job_says_what_it_is(tmp_path: Path) -> None:
    """It gives way and is requeued. It checks its code first, then runs the settings of its cell."""
    queue = Queue()
    sent(tmp_path, queue)
    _, cells = study_and_cells(make_study(tmp_path))
    told = set(queue.options[0])
    assert {"--requeue", "--no-kill", "--open-mode=append", "--partition=p", f"--job-name={cells[0].run_name}"} <= told
    assert any(option.startswith("--nice=") for option in told)
    folder = re.escape(str(cells[0].folder))
    wanted = (
        rf"#!/bin/bash\nexec .* ablate cell {folder} -- .* slurm run --run-id {cells[0].run_name} "
        rf"--run-dir {folder} --nproc-per-node 1 --give-way --no-standby -- -m opsd\.trainer {folder}/cell\.toml\n"
    )
    assert re.fullmatch(wanted, queue.scripts[100])
    assert opsd_command({"OPSD": "/opt/opsd -P"}) == ("/opt/opsd", "-P")


@pytest.mark.parametrize("signals", [(), (signal.SIGTERM,), (signal.SIGUSR1, signal.SIGTERM)])
def test_a_job_notes_how_long_it_held_its_node(tmp_path: Path, signals: tuple[int, ...]) -> None:
    """Until it was told to end, or ended; its run gets each signal, and its exit code is that of the job."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    prepare(cell)
    script = "trap 'echo usr1' USR1; trap 'echo term; sleep 1; exit 75' TERM; echo ready; "
    script += '[ -n "$1" ] || exit 0; while :; do sleep 0.1; done'
    command = [sys.executable, "-m", "opsd", "ablate", "cell", str(cell.folder), "--", "sh", "-c", script, "sh"]
    began = time.time()
    process = subprocess.Popen([*command, *(["wait"] if signals else [])], stdout=subprocess.PIPE, text=True)
    forked = time.time()
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in signals:
        process.send_signal(number)
        assert process.stdout.readline() == {signal.SIGUSR1: "usr1\n", signal.SIGTERM: "term\n"}[number]
    assert process.wait(20) == (75 if signals else 0)
    ended = time.time()
    process.stdout.close()
    start, end = (json.loads(line) for line in (cell.folder / "held.jsonl").read_text().splitlines())
    assert (start["event"], end["event"]) == ("start", "end")
    assert began - 0.02 < start["t"] < forked + 0.02  # a tick or two
    assert start["t"] < end["t"] <= ended - (1 if signals else 0)


def test_a_job_with_other_code_says_so(tmp_path: Path) -> None:
    """Its cell is refused, which is no failure of its arm, and runs again once the code is that of the study."""
    path = make_study(tmp_path)
    _, (cell, *_) = study_and_cells(path)
    prepare(cell)
    demand_origin(path.with_suffix(""))
    origin = path.with_suffix("") / "origin.json"
    ours = origin.read_text()
    origin.write_text(json.dumps({**json.loads(ours), "files": {}}))
    command = [sys.executable, "-m", "opsd", "ablate", "cell", str(cell.folder), "--", "true"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "the code of the trainer" in refused.stderr
    assert look(cell).state == "refused" and "the code of the trainer" in look(cell).reason
    assert metric_of(look(cell), "loss") is None
    origin.write_text(ours)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert look(cell).state == "stopped"


def test_jobs_go_where_they_give_way() -> None:
    """To the lowest of the partitions whose jobs are preempted and requeued."""
    high = Partition("train", ("n1", "n2"), 10, "OFF")
    low = Partition("spare", ("n1",), 1, "REQUEUE")
    middle = Partition("dev", ("n2",), 5, "REQUEUE")
    assert spare_partition([high, middle, low]) == "spare"
    for none in ([high], [low], [high, Partition("far", ("n9",), 1, "REQUEUE")], [high, replace(low, state="down")]):
        with pytest.raises(StudyError, match="--partition"):
            spare_partition(none)
