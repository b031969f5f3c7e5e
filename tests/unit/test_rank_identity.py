"""What a rank page or run.json says of processes, jobs, GPUs and sockets, against what others know."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.collectors.lib.gpu_owners import GpuOwners, Proof
from opsd.collectors.lib.processes import Identity
from opsd.collectors.ranks import RanksCollector
from opsd.rank_page import process_start
from tests.fakes.run_folder import ranks, read, reporter, runs, values, write_run

ME = os.getuid()


@pytest.fixture
def gpu_owners() -> GpuOwners:
    return GpuOwners()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "r1"
    folder.mkdir()
    return folder


@pytest.fixture
def collector(run: Path, gpu_owners: GpuOwners) -> RanksCollector:
    return RanksCollector(run.parent, gpu_owners=gpu_owners)


@pytest.fixture
def other() -> Iterator[int]:
    """A process of another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root: starts a process of another user")
    with subprocess.Popen(["sleep", "60"], user=65534, cwd="/") as process:
        yield process.pid
        process.kill()


def test_a_job_needs_slurms_word(run: Path, collector: RanksCollector, gpu_owners: GpuOwners) -> None:
    """About this very user: the page alone is no proof, and neither is the job of somebody else."""
    reporter(run, gpu=0, job="4242")
    write_run(run, os.getpid())
    for jobs, shown in (({}, ""), ({"4242": ME + 1}, ""), ({"4242": ME}, "4242")):
        gpu_owners.jobs = jobs
        reading = read(collector)
        assert [rank.job for rank in ranks(reading)] == [run.job for run in runs(reading)] == [shown]
        assert ("opsd_gpu_job_info", "0", shown, "r1", "0") in values(reading)


def test_the_control_group_decides_about_the_job(gpu_owners: GpuOwners) -> None:
    """Whatever the page says; a process that has ended was in the job it was in."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pid, start = process.pid, process_start(process.pid) or 0
        proof = Proof(ME, gpu_owners, lambda _pid: Identity(ME, "77"))
        assert proof.owns(pid, start, 0.0, pid)
    assert proof.owns(pid, start, 1.0, None)
    assert proof.job("4242") == "77"
    assert proof.owns(pid, start + 1, 1.0, None) is None


def test_a_control_group_with_a_sluid_is_the_job_that_slurm_names(gpu_owners: GpuOwners) -> None:
    """Since 26.05; while Slurm has not told which it is, the page's claim needs Slurm's word as outside of a group."""
    proof = Proof(ME, gpu_owners, lambda _pid: Identity(ME, "sEKNKTV3WPV500"))
    proof.owns(os.getpid(), 1, 0.0, os.getpid())
    assert proof.job("4242") == ""
    gpu_owners.jobs = {"4242": ME}
    assert proof.job("4242") == "4242"
    gpu_owners.sluids = {"sEKNKTV3WPV500": "77"}
    assert proof.job("4242") == "77"


def test_a_gpu_is_who_holds_its(run: Path, collector: RanksCollector, gpu_owners: GpuOwners, other: int) -> None:
    """A page's claim stands unless the driver lists only other users' processes, or says that nobody is on the GPU."""
    reporter(run, gpu=3)
    both = {3: (other, os.getpid())}
    for holders, gpu in (({}, 3), ({3: ()}, None), ({3: (other,)}, None), (both, 3)):
        gpu_owners.holders = holders
        assert [rank.gpu for rank in ranks(read(collector))] == [gpu]


def test_a_rank_keeps_the_gpu_that_it_had(
    run: Path, collector: RanksCollector, gpu_owners: GpuOwners, other: int
) -> None:
    """The list of the driver empties before a rank that dies is known to be dead; others on the GPU end the claim."""
    reporter(run, gpu=3)
    dead = {3: (1 << 22,)}
    for holders, gpu in (({3: (os.getpid(),)}, 3), (dead, 3), ({3: ()}, 3), ({3: (other,)}, None), ({3: ()}, None)):
        gpu_owners.holders = holders
        assert [rank.gpu for rank in ranks(read(collector))] == [gpu]


def test_the_processes_on_a_gpu_are_looked_up_once_for_all_pages() -> None:
    """250 of them, and 256 pages that name that GPU, were 64,000 looks each second."""
    asked = list[int]()

    def find_user(pid: int) -> int:
        asked.append(pid)
        return ME + pid % 2

    gpu_owners = GpuOwners(find_user)
    gpu_owners.holders = {0: (10, 11), 1: (12,)}
    assert [gpu_owners.may_hold(gpu, user) for gpu in (0, 1) for user in (ME, ME + 1, ME + 2)] == [
        True, True, False, True, False, False,
    ]  # fmt: skip
    assert gpu_owners.users_of_gpus() == {ME, ME + 1}
    assert asked == [10, 11, 12]
    gpu_owners.holders = {0: (13,)}
    assert not gpu_owners.may_hold(0, ME)


def test_the_launcher_is_the_users(run: Path, collector: RanksCollector, other: int) -> None:
    """A process of another user keeps no run alive."""
    write_run(run, other)
    assert [fact.alive for fact in runs(read(collector))] == [False]


@pytest.mark.parametrize("control", ["{root}/r2/control.sock", "{root}/r1/../r2/control.sock", "/run/x.sock", ""])
def test_the_control_socket_is_in_the_runs_own_folder(run: Path, collector: RanksCollector, control: str) -> None:
    """Any other is as good as none."""
    write_run(run, os.getpid(), control=control.format(root=run.parent))
    assert [fact.control for fact in runs(read(collector))] == [""]


def test_own_control_sockets_stay(run: Path, collector: RanksCollector) -> None:
    """The agent asks the launcher there, and knows whose run it is."""
    write_run(run, os.getpid())
    (fact,) = runs(read(collector))
    assert (fact.control, fact.user) == (f"{run}/control.sock", ME)
