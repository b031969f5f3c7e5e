"""Nodes that die at random moments of a job, as an ordinary user: each job ends as its run, and its chain goes on."""

from __future__ import annotations

import time
from random import Random

import pytest

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import USER
from tests.integration.slurm.test_job_end import submit
from tests.integration.slurm.test_users import ended, folder_of

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(300)]

WORK_S = 5.0
START_S, END_S = 4.0, 12.0
"""After the submission: launchers are not together before the first, and the run is over by the second."""


@pytest.mark.parametrize("seed", range(20))
def test_a_job_ends_as_its_run_whoever_dies(cluster: Cluster, seed: int) -> None:
    """The batch host at its start or while the run works, another node at any moment.

    A batch host that dies in the second between the end of the run and that of its job leaves the job running.
    """
    random = Random(seed)
    folder = folder_of(cluster, f"death-{seed}")
    job = submit(cluster, folder, f"sleep {WORK_S:g}", "--exclude=n4")
    slurm = CommandSlurm(runner_on(cluster.controller, USER))
    then = slurm.submit("#!/bin/sh\ntrue\n", [f"--dependency=afterok:{job}", "--output=/dev/null", "--nodelist=n4"])
    victim = random.choice(("n2", "n3")) if seed % 2 else "n1"
    if seed % 4 == 0:
        events = folder / "train/events.jsonl"
        wait_until(lambda: events.exists() and "generation_started" in events.read_text(), "the run has begun")
        time.sleep(random.uniform(0.0, WORK_S / 2))
    else:
        time.sleep(random.uniform(0.0, END_S if seed % 2 else START_S))
    try:
        cluster.nodes[victim].power_off()
        shown = ended(cluster, job, folder)
        said = "".join(path.read_text() for path in (folder / "train").glob("job.log"))
        assert "JobState=COMPLETED" in shown and "ExitCode=0:" in shown, (victim, shown, said)
        assert "JobState=COMPLETED" in ended(cluster, then, folder)
    finally:
        cluster.restore()
