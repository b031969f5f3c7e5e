"""Jobs and MIG instances on the GPUs of one node: whose an incident is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from opsd.agent.judge import Judge
from opsd.agent.window import Window
from opsd.collectors.base import NoData, Reading, Sample
from opsd.collectors.jobs import JobsCollector
from opsd.collectors.lib.gpu_owners import GpuJobs, GpuOwners
from opsd.collectors.slurm import JOB
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Finding
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.collectors import SILENT
from tests.fakes.nvml import DriverProcess, hasty, samples

# Two users' processes on the GPUs of one node: each incident names the job of its GPU.


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


# GPUs with MIG: their instances, and whose they are.


GIB = 1 << 30

USERS = (3001, 3002)


@pytest.fixture
def pids_of() -> Iterator[list[int]]:
    """A process of each of two users, in the jobs 71 and 72."""
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of several users")
    with ExitStack() as stack:
        found = []
        for user, job in zip(USERS, ("71", "72"), strict=True):
            sleep = subprocess.Popen(["sleep", "60"], user=user, env={"SLURM_JOB_ID": job})
            stack.callback(sleep.wait)
            stack.callback(sleep.kill)
            found.append(sleep.pid)
        yield found


def the_xid(jobs: Reading | NoData, driver: Reading | NoData) -> Finding:
    """The only finding of what the collectors of jobs and of the driver read."""
    assert isinstance(jobs, Reading) and isinstance(driver, Reading)
    window = Window("n1", witnesses={"nvml", "jobs"})
    window.begin(1.0, 1e9)
    window.add("jobs", jobs)
    window.add("nvml", driver)
    (found,) = (one for one in Judge(RUNBOOKS, SILENT).findings(window) if one.kind == "gpu_xid")
    return found


def test_instances_are_told_with_their_processes(gpus: SimulatedGpus, process: DriverProcess, library: str) -> None:
    """Sizes and UUIDs, what is used of each, and none of it of a GPU without MIG."""
    gpus[1].partition(["3g.40gb", "1g.10gb"])
    gpus[1].set_processes([(20, 5 * GIB, 1), (21, 4 * GIB, 1)])
    gpus[1].instance_memory(1, 9 * GIB)
    got = samples(process.NvmlCollector(library, hostname="node").collect())
    first, second = (("1", gpus[1].uuid, number, "0") for number in "12")
    assert {key: value for key, value in got.items() if key[0].startswith("opsd_mig_") and "info" not in key[0]} == {
        ("opsd_mig_memory_bytes", *first): 40 * GIB,
        ("opsd_mig_memory_bytes", *second): 10 * GIB,
        ("opsd_mig_memory_used_bytes", *first): 9 * GIB,
        ("opsd_mig_memory_used_bytes", *second): 0,
        ("opsd_mig_processes", *first): 2,
        ("opsd_mig_processes", *second): 0,
    }
    infos = {key[1:5]: key[5:] for key in got if key[0] == "opsd_mig_info"}
    assert {labels: info[1] for labels, info in infos.items()} == {first: "3g.40gb", second: "1g.10gb"}
    assert all(uuid.startswith("MIG-") for uuid, _ in infos.values())


def test_the_use_of_a_gpu_with_mig_is_unknown(gpus: SimulatedGpus, process: DriverProcess, library: str) -> None:
    """Not 0, which would be idle; without MIG it is told again."""
    collector = process.NvmlCollector(library, clock=hasty)

    def told() -> bool:
        return any(key[:2] == ("DCGM_FI_DEV_GPU_UTIL", "1") for key in samples(collector.collect()))

    assert told()
    gpus[1].partition(["7g.80gb"])
    assert not told()
    assert process.Holders(library).worked().keys() == {0, 2, 3, 4, 5, 6, 7}
    gpus[1].unite()
    assert eventually(told, 20)


def test_each_xid_of_an_instance_names_its_job(
    gpus: SimulatedGpus, process: DriverProcess, library: str, pids_of: list[int]
) -> None:
    """Two users share a GPU: the one whose instance failed has the incident, the other is only mentioned."""
    gpus[3].partition(["3g.40gb", "3g.40gb", "1g.10gb"])
    gpus[3].set_processes([(pids_of[0], GIB, 1), (pids_of[1], GIB, 2)])
    shared = process.Holders(library)
    gpu_owners = GpuOwners()
    gpu_owners.jobs = dict(zip(("71", "72"), USERS, strict=True))
    # Slurm's indexes count instances: they say nothing about GPUs.
    gpu_owners.allocated = {"71": frozenset({0}), "72": frozenset({1}), "73": frozenset({2})}
    gpu_owners.holders, gpu_owners.instances = shared.read(), shared.instances()
    jobs = JobsCollector(gpu_owners).collect()
    assert {key for key in samples(jobs) if key[0] != "opsd_gpu_job_idle_seconds"} == {
        ("opsd_gpu_job_info", "3", "71", "", ""),
        ("opsd_gpu_job_info", "3", "72", "", ""),
        ("opsd_mig_job_info", "3", "1", "71"),
        ("opsd_mig_job_info", "3", "2", "72"),
    }

    shared.tell(gpu_owners.jobs_on)
    gpus[3].raise_xid(31, instance=2)
    found = the_xid(jobs, shared.collect())
    assert (found.culprit.gpu, found.job) == (3, "72")
    assert "GPU 3 belongs to jobs 71, 72" in [fact.text for fact in found.evidence]


def test_an_xid_names_the_job_that_was_given_the_instance(
    gpus: SimulatedGpus, process: DriverProcess, library: str, tmp_path: Path
) -> None:
    """Before it has a process there: by Slurm's device files and the driver's numbers in procfs."""
    gpus[3].partition(["3g.40gb", "3g.40gb"])
    for gpu in range(8):
        information = tmp_path / f"driver/nvidia/gpus/0000:{gpu:02x}:00.0/information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Device Minor: \t {gpu}\n")
    for instance, minor in ((1, 417), (2, 426)):
        access = tmp_path / f"driver/nvidia/capabilities/gpu3/mig/gi{instance}/access"
        access.parent.mkdir(parents=True)
        access.write_text(f"DeviceFileMinor: {minor}\n")
    shared, gpu_owners = process.Holders(library), GpuOwners()
    gpu_owners.holders, gpu_owners.instances = shared.read(), shared.instances()
    gpu_owners.files = {"71": [("nvidia3", "nvidia-cap417")], "72": [("nvidia3", "nvidia-cap426")]}
    jobs = JobsCollector(gpu_owners, GpuJobs(gpu_owners, proc=tmp_path)).collect()
    shared.tell(gpu_owners.jobs_on)
    gpus[3].raise_xid(31, instance=2)
    found = the_xid(jobs, shared.collect())
    assert (found.culprit.gpu, found.job) == (3, "72")
