"""A quota or a disk that is full, as an ordinary user: below the run's folder, below the job's output."""

from __future__ import annotations

import errno
import shlex

import pytest

from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import Job
from tests.fakes.power_loss import Faults, library
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import USER
from tests.integration.slurm.test_users import ended, folder_of, submit

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("below", ["", "train", "train/generations"])
def test_a_run_does_not_begin_over_its_quota(cluster: Cluster, below: str) -> None:
    """The job ends at once with 74 and says what is full: it used to hold its nodes for half an hour, or end with 2."""
    folder = folder_of(cluster, f"quota-{below.replace('/', '-')}")
    full = folder / "runs" / below
    full.mkdir(parents=True)
    cluster.controller.run("chown", "--recursive", USER, str(folder / "runs"))
    faults = Faults(full, first=1, count=100_000, error=errno.EDQUOT)
    environment = dict(faults.environment)
    (cluster.shared / library().name).write_bytes(library().read_bytes())
    environment["LD_PRELOAD"] = str(cluster.shared / library().name)
    opsd = folder / "opsd"
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    opsd.write_text(opsd.read_text().replace("\nexport ", f"\nexport {exports} "))
    command = f"slurm run --run-id train --runs {folder}/runs --no-python -- sleep 60"
    script = f"#!/bin/sh\nexport OPSD={opsd}\nexec $OPSD {command}\n"
    options = ("-N2", "--no-kill", f"--chdir={folder}", "--output=job.out")
    job = CommandSlurm(runner_on(cluster.controller, USER)).submit(script, options)
    shown, said = ended(cluster, job, folder), (folder / "job.out").read_text()
    assert "JobState=FAILED" in shown and "ExitCode=74:0" in shown, (shown, said)
    assert "Disk quota exceeded" in said and "Traceback" not in said and "Usage" not in said, said


def test_a_job_goes_on_whose_output_cannot_be_written(cluster: Cluster) -> None:
    """Nor that of the job that puts it back into the queue: what they say is lost, and the run is not."""
    folder = folder_of(cluster, "full-output")
    (folder / "train/requeue.log").mkdir(parents=True)
    (folder / "train").chmod(0o777)
    job = submit(cluster, folder, "--output=/dev/full", does="[ -e again ] || { touch again; sleep 60; }")
    slurm = CommandSlurm(runner_on(cluster.controller, USER))
    wait_until((folder / "again").exists, "the run has begun")
    cluster.controller.run("scancel", "--signal=USR1", str(job))
    wait_until(lambda: restarts(slurm.jobs([job])) == 1, "the job was put back")
    assert "JobState=COMPLETED" in (shown := ended(cluster, job, folder)) and "Restarts=1" in shown
    everything = cluster.controller.run("scontrol", "show", "jobs", "--oneliner").stdout.splitlines()
    [helper] = [line for line in everything if f"JobName=opsd-requeue-{job} " in line]
    assert "JobState=COMPLETED" in helper, helper


def restarts(found: tuple[Job, ...]) -> int:
    """How often the job was put back, -1 if there is none."""
    return found[0].restarts if found else -1
