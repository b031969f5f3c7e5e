"""A study as jobs of an ordinary user on a real Slurm: submitters are killed, cells are preempted, each runs once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest

from opsd.ablate.cells import Cell, cells_of, cost_of_all, look
from opsd.ablate.study import read_study
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import Job
from tests.fakes.clock import eventually
from tests.integration.slurm import accounting
from tests.integration.slurm.cluster import FAST, Cluster, missing, runner_on, wait_until
from tests.integration.slurm.templates import USER
from tests.integration.slurm.training import OPSD, install, make_data

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(7200)]

SEEDS, ALONE = 15, 2
"""Seeds of the study, and of them those that also run undisturbed on this machine."""
STEPS = 120
STUDY = """
baseline = "tiny"
seeds = SEEDS
set = [
    "data.shards=SHARDS", "run.steps=STEPS", "schedule.decay_start=40", "schedule.decay_end=STEPS",
    "checkpoint.every=10", "data.sequence=64",
]
[arm.untied]
set = ["model.tied=false"]
"""
KILLS = 10
FREE_S = 2.0
"""A cell gives way so many seconds later at most than a job that does nothing."""
ACCOUNTED = 0.01
"""By so much the cost may differ from that of the accounting."""


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster of its own, with a GPU in each node and with accounting."""
    if reason := missing() or accounting.missing():
        pytest.skip(reason)
    settings = {**FAST, "AccountingStorageTRES": "gres/gpu"}
    with Cluster(["n1", "n2", "n3"], settings, gpus=1, dbd={}) as cluster:
        yield cluster


def losses(cells: Sequence[Cell]) -> dict[str, dict[int, float]]:
    """Every loss by cell and step; a step that was done again must have had the same."""
    curves: dict[str, dict[int, float]] = {}
    for cell in cells:
        curve = curves.setdefault(cell.name, {})
        for line in (cell.folder / "metrics.jsonl").read_text().splitlines():
            step = json.loads(line)
            assert curve.setdefault(step["step"], step["loss"]) == step["loss"]
    return curves


@dataclass
class StudyOnSlurm:
    """The study, and the command that submits it as an ordinary user."""

    cluster: Cluster
    seeds: int = SEEDS
    free_s: list[float] = field(default_factory=list)
    """How long the main run waited for each node that a cell had."""

    def __post_init__(self) -> None:
        shared = self.cluster.shared
        self.slurm = CommandSlurm(runner_on(self.cluster.controller))
        self.file, self.root = shared / "study.toml", shared / "cells"
        text = STUDY.replace("SHARDS", str(make_data(shared, 400_000)))
        self.file.write_text(text.replace("SEEDS", str(self.seeds)).replace("STEPS", str(STEPS)))
        self.root.mkdir()
        self.root.chmod(0o777)
        opsd = shared / "opsd"
        exports = f"OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 HOME={self.root} OPSD={opsd}"
        opsd.write_text(OPSD.format(exports=exports, python=sys.executable, packages=install(shared)))
        opsd.chmod(0o755)
        self.words = (
            str(opsd), "ablate", "run", str(self.file), "--dir", str(self.root), "--limit", "1",
            "--sbatch=--gpus-per-node=1",
        )  # fmt: skip
        self.cells = cells_of(read_study(self.file), self.root)

    def jobs(self) -> list[Job]:
        """All that Slurm still knows, those that have ended included."""
        names = {cell.run_name for cell in self.cells}
        return [job for job in self.slurm.jobs() if job.name in names]

    def submit(self) -> str:
        """Submit to the end; returns what was said."""
        return self.cluster.controller.run(*self.words, user=USER, timeout=120).stdout

    def submit_and_be_killed(self, rng: random.Random, at_job: bool) -> None:
        """Be killed in the moment of the next job, or at any moment of the first seconds."""
        before, pid = len(self.jobs()), self.root / "pid"
        pid.unlink(missing_ok=True)
        script = f'echo $$ > {pid}; exec "$@"'
        command = self.cluster.controller.command("sh", "-c", script, "sh", *self.words, user=USER)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if at_job:
            eventually(lambda: len(self.jobs()) > before or process.poll() is not None, 60)
        else:
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.2, 4))
        self.cluster.controller.run("sh", "-c", f"kill -KILL $(cat {pid})", check=False)
        process.wait(60)

    def preempt_each(self) -> None:
        """Until all cells are done: once a cell has checkpoints, the main run needs its node, for a moment."""
        taken: set[str] = set()
        limit = time.monotonic() + 120 + 120 * len(self.cells)
        while any(look(cell).state != "done" for cell in self.cells):
            assert time.monotonic() < limit, self.report()
            running = {job.name: job for job in self.jobs() if job.state == "running"}
            for cell in self.cells:
                if cell.run_name in running and cell.run_name not in taken and look(cell).step > 15:
                    taken.add(cell.run_name)
                    self.free_s.append(self._take(running[cell.run_name].batch_host))
            time.sleep(0.3)
        assert taken == {cell.run_name for cell in self.cells}

    def _take(self, node: str) -> float:
        """Seconds from the submission of a job of the main run until it runs on ``node``."""
        told = self.cluster.shared / f"free-{time.monotonic_ns()}"
        script = f"date +%s.%N > {told}.new; mv {told}.new {told}"
        began = time.time()
        self.cluster.controller.run(
            "sbatch", "--partition=train", "--exclusive", f"--nodelist={node}", f"--wrap={script}"
        )
        wait_until(told.exists, f"{node} for the main run", 60)
        return float(told.read_text()) - began

    def take_from_plain_job(self) -> float:
        """Seconds until the main run has the node of a job that does nothing and saves nothing."""
        words = ("sbatch", "--parsable", "--partition=dev", "--exclusive", "--wrap=exec sleep 1000")
        number = int(self.cluster.controller.run(*words).stdout)
        wait_until(lambda: self.slurm.jobs([number])[0].state == "running", "a plain job", 60)
        seconds = self._take(self.slurm.jobs([number])[0].batch_host)
        self.cluster.controller.run("scancel", str(number))
        return seconds

    def report(self) -> str:
        """Where the cells are, for a test that fails."""
        logs = ((cell.folder / "cell.log") for cell in self.cells)
        said = "\n".join(log.read_text()[-400:] for log in logs if log.exists())
        return f"{[(look(cell).state, look(cell).step) for cell in self.cells]}\n{self.jobs()}\n{said}"

    def accounted_gpu_hours(self) -> float:
        """What Slurm's accounting has for all starts of the cells' jobs."""
        names = ",".join(cell.run_name for cell in self.cells)
        words = ("sacct", "-D", "-X", "-n", "-P", f"--name={names}", "--format=JobName,ElapsedRaw,AllocTRES,State")
        lines = [line.split("|") for line in self.cluster.controller.run(*words).stdout.splitlines()]
        assert len(lines) == 2 * len(self.cells) and all("gres/gpu=1" in tres for _, _, tres, _ in lines), lines
        return sum(int(seconds) for _, seconds, _, _ in lines) / 3600


def test_killed_submitters_and_preemptions_change_nothing(own_cluster: Cluster) -> None:
    """Each cell runs once and goes on where it was; losses, the wait of the main run and the cost are as promised."""
    study, rng = StudyOnSlurm(own_cluster), random.Random(37)
    seen: dict[int, str] = {}
    for number in range(KILLS):
        study.submit_and_be_killed(rng, at_job=number % 2 == 1)
        seen |= {job.id: job.name for job in study.jobs()}
    study.submit()
    seen |= {job.id: job.name for job in study.jobs()}
    study.preempt_each()
    assert set(seen.values()) == {cell.run_name for cell in study.cells}
    assert len(seen) <= len(study.cells) + KILLS, "one job more at most for each killed submitter"
    wait_until(lambda: not any(job.state in ("running", "pending") for job in study.jobs()), "the last jobs", 120)

    for cell in study.cells:
        events = [json.loads(line) for line in (cell.folder / "events.jsonl").read_text().splitlines()]
        started = [event for event in events if event["event"] == "generation_started"]
        assert len(started) == 2, cell.folder
        assert look(cell).cost.recomputed * 3600 < 15 * look(cell).cost.gpu_hours * 3600 / STEPS
    curves = losses(study.cells)
    assert [sorted(curve) for curve in curves.values()] == [list(range(1, STEPS + 1))] * len(study.cells)

    plain_s = [study.take_from_plain_job() for _ in range(3)]
    print(f"the main run had a node after {sorted(study.free_s)} s; {len(seen) - len(study.cells)} jobs too many")
    print(f"it had the node of a job that only sleeps after {sorted(plain_s)} s")
    cost = cost_of_all([look(cell) for cell in study.cells])
    accounted = study.accounted_gpu_hours()
    print(f"cost {cost}; accounting {accounted}: {cost.gpu_hours / accounted - 1:+.3%}")
    assert cost.gpu_hours == pytest.approx(accounted, rel=ACCOUNTED)
    assert median(study.free_s) < FREE_S + median(plain_s), "Slurm alone is as slow as the machine is busy"

    assert "0 jobs submitted" in study.submit()
    study.file.write_text(study.file.read_text().replace(f"seeds = {study.seeds}", f"seeds = {ALONE}"))
    here = Path(str(study.root) + "-here")
    alone = [sys.executable, "-m", "opsd", "ablate", "run", str(study.file), "--dir", str(here), "--local"]
    environment = {"OMP_NUM_THREADS": "1", "HOME": str(own_cluster.shared), "PATH": "/usr/bin:/bin"}
    subprocess.run(alone, check=True, env=environment)
    undisturbed = losses(cells_of(read_study(study.file), here))
    assert undisturbed == {name: curves[name] for name in undisturbed}
