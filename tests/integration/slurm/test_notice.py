"""``--signal`` with a notice as long as the time limit: each start is told to stop as soon as it has begun."""

from __future__ import annotations

import sys

import pytest

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import USER

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.waiting, pytest.mark.timeout(900)]

SIGNALS = ("USR1", "TERM", "B:USR1", "B:TERM")


def test_it_is_not_requeued_for_ever(cluster: Cluster) -> None:
    """Whichever process gets which signal: it ends after a few starts without progress, and says why."""
    slurm, jobs = CommandSlurm(runner_on(cluster.controller, USER)), dict[str, int]()
    for number, signal in enumerate(SIGNALS, start=1):
        folder = cluster.shared / f"notice-{number}"
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "prog.py").write_text("import time\ntime.sleep(1000)\n")
        script = (
            f"#!/bin/bash\nexport HOME={folder} PYTHONPATH={':'.join(sys.path)}\n"
            f"exec {sys.executable} -m opsd slurm run --runs {folder} -- prog.py\n"
        )
        options = [
            "--nodes=1", "--exclusive", "--no-kill", "--requeue", "--open-mode=append", "--time=1", f"--chdir={folder}",
            "--output=job.out", f"--signal={signal}@120",
        ]  # fmt: skip
        jobs[signal] = slurm.submit(script, options)
    wait_until(lambda: not slurm.jobs(list(jobs.values())), "all jobs have ended", 600)
    for number, (signal, job) in enumerate(jobs.items(), start=1):
        said = (cluster.shared / f"notice-{number}" / "job.out").read_text()
        shown = cluster.controller.run("scontrol", "show", "job", str(job), "--oneliner").stdout
        assert "JobState=FAILED" in shown, (signal, shown, said)
        starts, told = (10, "SIGTERM") if signal == "TERM" else (3, "SIGUSR1")
        assert said.count("the run is over (75)") == starts, (signal, said)
        assert f"start {starts} in a row that was told to stop by {told} before it came any further" in said, said
