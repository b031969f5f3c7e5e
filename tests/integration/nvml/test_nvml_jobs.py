"""Two users' processes on the GPUs of one node: each incident names the job of its GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from opsd.agent.judge import Judge
from opsd.agent.window import Window
from opsd.collectors.base import Reading, Sample
from opsd.collectors.jobs import JobsCollector
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.slurm import JOB
from opsd.runbooks import RUNBOOKS
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.agent import SILENT
from tests.fakes.nvml import DriverProcess

ADA, BOB = 3001, 3002


@pytest.fixture
def pids() -> Iterator[dict[int, int]]:
    """A process of each user that says which job it is in, by user."""
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of several users")
    with ExitStack() as stack:
        found = {}
        for user, job in ((ADA, "71"), (BOB, "72")):
            sleep = subprocess.Popen(["sleep", "60"], user=user, env={"SLURM_JOB_ID": job})
            stack.callback(sleep.wait)
            stack.callback(sleep.kill)
            found[user] = sleep.pid
        yield found


def test_an_incident_names_the_job_of_its_gpu(
    gpus: SimulatedGpus, process: DriverProcess, library: str, pids: dict[int, int]
) -> None:
    """Not that of the other user on the same node, and none for a GPU that nobody has, or both."""
    gpus[1].set_processes([(pids[ADA], 1 << 30)])
    gpus[2].set_processes([(pids[BOB], 1 << 30)])
    gpus[4].set_processes([(pids[ADA], 1 << 30), (pids[BOB], 1 << 30)])
    gpu_owners = GpuOwners()
    gpu_owners.jobs, gpu_owners.holders = {"71": ADA, "72": BOB}, process.Holders(library).read()
    jobs = JobsCollector(gpu_owners).collect()
    assert isinstance(jobs, Reading)
    collector = process.NvmlCollector(library)
    collector.collect()
    for index in (1, 2, 3, 4):
        gpus[index].raise_xid(79)

    window = Window("n1", witnesses={"nvml", "jobs"})
    window.begin(1.0, 1e9)
    window.add("slurm", Reading((Sample(JOB, 1.0, ("71", "ada", "gpu", "running")),)))
    window.add("jobs", jobs)
    window.add("nvml", collector.collect())
    found = [one for one in Judge(RUNBOOKS, SILENT).findings(window) if one.kind == "gpu_xid"]
    assert {one.culprit.gpu: one.job for one in found} == {1: "71", 2: "72", 3: "", 4: ""}
    said = {one.culprit.gpu: [fact.text for fact in one.evidence] for one in found}
    assert "GPU 1 belongs to job 71 of ada" in said[1]
    assert "GPU 2 belongs to job 72" in said[2]
    assert "GPU 4 belongs to jobs 71 of ada, 72" in said[4]
