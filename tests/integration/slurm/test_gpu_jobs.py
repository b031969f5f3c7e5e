"""Two users share a node with GPUs: whose each GPU is, by a real Slurm and the kernel, without control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.agent.collectors import NodeWatch
from opsd.collectors.lib.gpu_owners import GpuJobs, GpuOwners
from opsd.slurm import gres_devices
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until
from tests.integration.slurm.templates import FOLDER, SECOND_USER, USER

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(120)]

SCRIPT = """#!/bin/sh
exec sleep 300
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One node with four GPUs."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1"], gpus=4) as cluster:
        yield cluster


def started(cluster: Cluster, user: str, gpus: int) -> tuple[str, int]:
    """A job of ``user``: its id, and its process by the number that it has on this machine."""
    slurm = CommandSlurm(runner_on(cluster.controller, user))
    options = [f"--gres=gpu:{gpus}", "--cpus-per-task=1", "--mem=100", "--output=/dev/null", "--chdir=/tmp"]
    job = slurm.submit(SCRIPT, options)
    found: list[int] = []

    def runs() -> bool:
        found[:] = (int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if sleeps(path, job))
        return bool(found)

    wait_until(runs, f"job {job} runs")
    return str(job), found[0]


def sleeps(path: Path, job: int) -> bool:
    """Whether this is the ``cmdline`` of the job's process."""
    try:
        environment = path.with_name("environ").read_bytes()
        return path.read_bytes() == b"sleep\x00300\x00" and f"\0SLURM_JOB_ID={job}\0".encode() in environment
    except OSError:
        return False


def test_each_gpu_is_known_as_its_jobs(cluster: Cluster) -> None:
    """By what Slurm gave each job, and by whose process is on it."""
    (first, first_pid), (second, second_pid) = started(cluster, USER, 1), started(cluster, SECOND_USER, 2)
    report = NodeWatch(CommandSlurm(runner_on(cluster.controller)), "n1").refresh()
    assert {job: len(gpus) for job, gpus in report.gpus.items()} == {first: 1, second: 2}
    mine, theirs = report.gpus[first], report.gpus[second]
    assert not mine & theirs

    gpu_owners = GpuOwners()
    gpu_owners.jobs, gpu_owners.allocated = report.users, report.gpus
    gpu_owners.holders = dict.fromkeys(range(4), ())
    assert GpuJobs(gpu_owners).look() == {gpu: {first if gpu in mine else second} for gpu in mine | theirs}
    gpu_owners.allocated = {}
    gpu_owners.holders = {**gpu_owners.holders, min(mine): (first_pid,), min(theirs): (second_pid,)}
    assert GpuJobs(gpu_owners).look() == {min(mine): {first}, min(theirs): {second}}


def test_each_task_of_an_array_has_its_own_gpu(cluster: Cluster) -> None:
    """Also the last one, by whose number ``scontrol show job`` shows all of them."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    options = ["--array=1-3", "--gres=gpu:1", "--cpus-per-task=1", "--mem=100", "--output=/dev/null"]
    last = slurm.submit(SCRIPT, options)
    wait_until(lambda: [job.state for job in slurm.jobs()] == ["running"] * 3, "all tasks run")
    given = NodeWatch(slurm, "n1").refresh().gpus
    assert given.keys() == {str(last), str(last + 1), str(last + 2)}
    assert sorted(gpu for gpus in given.values() for gpu in gpus) == [0, 1, 2]


PAIR = """#!/bin/sh
# opsd with a pair of nodes that is due, and a measurement that tells what its step has.
case "$*" in
*--pairs*) echo 'n[1-2]' ;;
preflight*) scontrol show step "$SLURM_JOB_ID.$SLURM_STEP_ID" >{folder}/"$SLURMD_NODENAME" ;;
esac
"""


def test_a_way_between_leaves_is_measured_with_the_gpus_of_the_nodes() -> None:
    """Without them a measurement would be one of sockets, where jobs have InfiniBand."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1", "n2"], gpus=4) as cluster:
        opsd = cluster.shared / "opsd"
        opsd.write_text(PAIR.format(folder=cluster.shared))
        opsd.chmod(0o755)
        cluster.controller.run("env", "PARTITION=dev", f"OPSD={opsd}", str(FOLDER / "idle-checks.sh"))
        told = [cluster.shared / "n1", cluster.shared / "n2"]
        wait_until(lambda: all(path.exists() and path.read_text() for path in told), "both nodes measure")
        assert ["gpu:4" in path.read_text() for path in told] == [True, True]


PARTS = (
    ("3g", ("nvidia0", "nvidia-cap21", "nvidia-cap22")),
    ("1g", ("nvidia0", "nvidia-cap12", "nvidia-cap13")),
    ("h100", ("nvidia2",)),
    ("1g", ("nvidia1", "nvidia-cap147", "nvidia-cap148")),
)


def test_each_instance_of_mig_is_known_by_its_files() -> None:
    """Slurm numbers GPUs by type and not as gres.conf lists them; slurmd prints them as they are numbered."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1"], parts=PARTS) as cluster:
        slurm = CommandSlurm(runner_on(cluster.controller))
        options = ["--cpus-per-task=1", "--mem=100", "--output=/dev/null", "--chdir=/tmp"]
        kinds = ("1g", "h100", "3g", "1g")
        jobs = [slurm.submit(SCRIPT, [f"--gres=gpu:{kind}:1", *options]) for kind in kinds]
        wait_until(lambda: all(job.state == "running" for job in slurm.jobs(jobs)), "all jobs run")

        def gres(node: str) -> tuple[gres_devices.Files, ...]:
            return gres_devices.read(node, runner_on(cluster.nodes[node]))

        found = NodeWatch(slurm, "n1", gres=gres, has_instances=lambda: True).refresh().files
        files = {kind: {files for of, files in PARTS if of == kind} for kind in kinds}
        assert [{*found[str(job)]} <= files[kind] for job, kind in zip(jobs, kinds, strict=True)] == [True] * 4
        assert sorted(each for several in found.values() for each in several) == sorted(each for _, each in PARTS)
