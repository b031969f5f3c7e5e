"""A study as jobs of an ordinary user on a real Slurm: submitters are killed, cells are preempted, each runs once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.ablate.cells import Cell, cells_of, look
from opsd.ablate.study import read_study
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until
from tests.integration.slurm.templates import USER
from tests.integration.slurm.training import OPSD, install, make_data

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(600)]

STUDY = """
baseline = "tiny"
seeds = 2
set = [
    "data.shards=SHARDS", "run.steps=60", "schedule.decay_start=40", "schedule.decay_end=60", "checkpoint.every=5",
    "data.sequence=64",
]
[arm.untied]
set = ["model.tied=false"]
"""


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster of its own."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1", "n2", "n3"]) as cluster:
        yield cluster


def losses(cells: list[Cell]) -> dict[str, dict[int, float]]:
    """Every loss by cell and step; a step that was done again must have had the same."""
    curves: dict[str, dict[int, float]] = {}
    for cell in cells:
        curve = curves.setdefault(cell.name, {})
        for line in (cell.folder / "metrics.jsonl").read_text().splitlines():
            step = json.loads(line)
            assert curve.setdefault(step["step"], step["loss"]) == step["loss"]
    return curves


def test_killed_submitters_and_preemptions_change_nothing(own_cluster: Cluster) -> None:
    """No cell has two jobs, a preempted one goes on, and all losses have the bits of a study on one machine."""
    cluster, slurm = own_cluster, CommandSlurm(runner_on(own_cluster.controller))
    shared = cluster.shared
    study = shared / "study.toml"
    study.write_text(STUDY.replace("SHARDS", str(make_data(shared, 400_000))))
    root = shared / "cells"
    root.mkdir()
    root.chmod(0o777)
    opsd = shared / "opsd"
    exports = f"OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 HOME={root} OPSD={opsd}"
    opsd.write_text(OPSD.format(exports=exports, python=sys.executable, packages=install(shared)))
    opsd.chmod(0o755)
    words = [str(opsd), "ablate", "run", str(study), "--dir", str(root), "--limit", "2", "--partition", "dev"]
    cells = cells_of(read_study(study), root)
    submitted: set[int] = set()
    for seconds in (1, 2, 3):  # killed before, between and after its jobs
        cluster.controller.run("timeout", "-s", "KILL", str(seconds), *words, user=USER, check=False)
        submitted |= {job.id for job in slurm.jobs() if job.name in {cell.name for cell in cells}}
    cluster.controller.run(*words, user=USER)
    submitted |= {job.id for job in slurm.jobs() if job.name in {cell.name for cell in cells}}
    assert len(submitted) == len(cells)

    wait_until(lambda: look(cells[0]).step > 10, "a cell with checkpoints", 300)
    (job,) = (job for job in slurm.jobs() if job.name == cells[0].name)
    where = ("--partition=train", "--exclusive", f"--nodelist={job.batch_host}")
    cluster.controller.run("sbatch", *where, "--wrap=sleep 5")
    wait_until(lambda: slurm.jobs([job.id])[0].restarts == 1, "its preemption", 120)
    wait_until(lambda: all(look(cell).state == "done" for cell in cells), "the end of the study", 500)
    assert [sorted(curve) for curve in losses(cells).values()] == [list(range(1, 61))] * len(cells)

    here = Path(str(root) + "-here")
    alone = [sys.executable, "-m", "opsd", "ablate", "run", str(study), "--dir", str(here), "--local"]
    subprocess.run(alone, check=True, env={"OMP_NUM_THREADS": "1", "HOME": str(shared), "PATH": "/usr/bin:/bin"})
    assert losses(cells) == losses(cells_of(read_study(study), here))
    again = cluster.controller.run(*words, user=USER)
    assert "0 jobs submitted" in again.stdout
