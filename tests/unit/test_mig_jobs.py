"""Whose an instance of MIG is while nothing runs on it: by what Slurm gave each job, and the files that open it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from opsd.agent.collectors import NodeWatch
from opsd.collectors.jobs import JobsCollector
from opsd.collectors.lib.gpu_owners import GpuJobs, GpuOwners, MigDevices, has_instances
from opsd.collectors.slurm import SlurmCollector
from opsd.slurm import gres_devices
from opsd.slurm.port import Job, Node, SlurmDenied, SlurmError, SlurmRejected
from opsd.slurm.runner import Output
from tests.fakes.nvml import samples
from tests.fakes.slurm import FakeSlurm

RECORDED = """\
slurmd: Gres Name=gpu Type=1g Count=1 Index=13 ID=7696487 File=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap12,/dev/nvidia-caps/nvidia-cap13 (null)
slurmd: Gres Name=gpu Type=1g Count=1 Index=148 ID=7696487 File=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap147,/dev/nvidia-caps/nvidia-cap148 (null)
slurmd: Gres Name=gpu Type=3g Count=1 Index=22 ID=7696487 File=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21,/dev/nvidia-caps/nvidia-cap22 (null)
slurmd: Gres Name=gpu Type=h100 Count=1 Index=2 ID=7696487 File=/dev/nvidia2 (null)
"""  # noqa: E501
"""Of 22.05.8; its scontrol shows ``GRES=gpu:1g:1(IDX:0)`` for a job with the first, ``h100:1(IDX:3)`` for the last."""
NEWER = (
    "slurmd-io-io-gpu-02: Gres Name=gpu Type=nvidia_h100_80gb_hbm3 Count=2 Index=1 ID=7696487 "
    "File=/dev/nvidia[0-1] Links=(null) Flags=HAS_FILE,HAS_TYPE,ENV_NVML,ENV_RSMI\n"
)
"""The form that stackhpc/ansible-slurm-appliance#656 shows."""
TIMED = """\
[2026-11-23T23:59:53.061] error: /dev/nvidia0 is not a valid character or block device, fix your gres.conf
[2026-11-23T23:59:53.062] Gres Name=gpu Type=3g Count=1 Index=22 ID=7696487 File=/dev/nvidia0,/dev/nvidia-cap21,/dev/nvidia-cap22 Links=(null) Flags=HAS_FILE,HAS_TYPE,ENV_NVML,ENV_RSMI,ENV_ONEAPI,ENV_OPENCL,ENV_DEFAULT
[2026-11-23T23:59:53.062] Gres Name=gpu Type=h100 Count=1 Index=2 ID=7696487 File=/dev/nvidia2 Links=(null) Flags=HAS_FILE,HAS_TYPE,ENV_NVML,ENV_RSMI,ENV_ONEAPI,ENV_OPENCL,ENV_DEFAULT
"""  # noqa: E501
"""Of 26.05.3, with other folders; 25.11.7 prints the same."""
SMALL, OTHER, LARGE, WHOLE = gres_devices.parse(RECORDED)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Three GPUs; the first two are parted, and the driver numbers its capabilities in another order than devices."""
    for bus, minor in (("0000:1b:00.0", 1), ("0000:43:00.0", 0), ("0000:52:00.0", 2)):
        information = tmp_path / "driver/nvidia/gpus" / bus / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t NVIDIA H100\nDevice Minor: \t {minor}\n")
    for path, minor in (("gpu0/mig/gi1", 12), ("gpu0/mig/gi1/ci0", 13), ("gpu0/mig/gi2", 21), ("gpu1/mig/gi1", 147)):
        access = tmp_path / "driver/nvidia/capabilities" / path / "access"
        access.parent.mkdir(parents=True)
        access.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    return tmp_path


@pytest.fixture
def gpu_owners() -> GpuOwners:
    """Nothing runs on the instances; by index the second GPU is /dev/nvidia0."""
    gpu_owners = GpuOwners()
    gpu_owners.holders = {0: (), 1: (), 2: ()}
    gpu_owners.instances = {0: {1: ()}, 1: {1: (), 2: ()}}
    return gpu_owners


def run_by(proc: Path, pid: int, job: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (py) R {' 0' * 18} 100 0")
    (proc / str(pid) / "status").write_text("Name:\tpy\nUid:\t1\t1\t1\t1\n")
    (proc / str(pid) / "cgroup").write_text(f"0::/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0\n")


def test_the_files_of_each_gpu_are_in_slurms_order() -> None:
    """Which is by type; the index that is printed is none."""
    assert SMALL == ("nvidia0", "nvidia-cap12", "nvidia-cap13")
    assert (OTHER[0], LARGE[1], WHOLE) == ("nvidia1", "nvidia-cap21", ("nvidia2",))
    assert gres_devices.parse(NEWER) == (("nvidia0",), ("nvidia1",))
    assert gres_devices.parse(TIMED) == (("nvidia0", "nvidia-cap21", "nvidia-cap22"), ("nvidia2",))
    assert gres_devices.parse("") == ()


@pytest.mark.parametrize(
    "line", ["Count=2 ID=7696487 (null)", "Count=3 Index=0 ID=7 File=/dev/nvidia[0-1]", "Count=1 ID=7 File=/dev/n[3-1]"]
)
def test_an_order_that_is_not_certain_is_refused(line: str) -> None:
    """Rather than one GPU taken for another."""
    with pytest.raises(SlurmRejected, match="slurmd -G"):
        gres_devices.parse(f"{RECORDED}slurmd: Gres Name=gpu Type=(null) {line}\n")


def test_a_node_without_a_file_of_its_own_uses_what_slurmd_was_sent(tmp_path: Path) -> None:
    """As slurmd itself does where it runs configless."""
    asked: list[Sequence[str]] = []

    def run(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        asked.append(argv)
        return Output(0, "", RECORDED)

    (tmp_path / "slurm.conf").touch()
    environ = {"SLURM_CONF": str(tmp_path / "none")}
    assert len(gres_devices.read("n1", run, environ=environ, configless=tmp_path)) == 4
    gres_devices.read("n1", run, environ={"SLURM_CONF": str(tmp_path / "slurm.conf")}, configless=tmp_path)
    plain = ["slurmd", "-G", "-N", "n1"]
    assert asked == [[*plain, "-f", str(tmp_path / "slurm.conf")], plain]
    with pytest.raises(SlurmError):
        gres_devices.read("n1", lambda argv, deadline_s, stdin="": Output(1, "", "no"), environ={})


def test_a_file_names_gpu_and_instance(proc: Path) -> None:
    """The GPU by its own file, since its capabilities are numbered otherwise."""
    devices = MigDevices(proc)
    assert [devices.instance(files) for files in (SMALL, OTHER, LARGE, WHOLE)] == [(1, 1), (0, 1), (1, 2), (2, None)]
    for files in (["nvidia9"], ["nvidia0", "nvidia-cap99"], ["nvidia0", "nvidia1"], ["nvidia-cap12"], []):
        assert devices.instance(files) is None
    assert has_instances(proc)
    assert not has_instances(proc / "nothing")


def test_a_job_has_its_instance_before_anything_runs_on_it(gpu_owners: GpuOwners, proc: Path) -> None:
    """Two jobs on one GPU, one on a whole GPU; an instance of nobody stays nobody's."""
    gpu_owners.files = {"71": [SMALL], "72": [LARGE], "73": [WHOLE]}
    jobs = GpuJobs(gpu_owners, proc=proc)
    told = {key for key in samples(JobsCollector(gpu_owners, jobs).collect()) if key[0] != "opsd_gpu_job_idle_seconds"}
    assert told == {
        ("opsd_gpu_job_info", "1", "71", "", ""),
        ("opsd_gpu_job_info", "1", "72", "", ""),
        ("opsd_gpu_job_info", "2", "73", "", ""),
        ("opsd_mig_job_info", "1", "1", "71"),
        ("opsd_mig_job_info", "1", "2", "72"),
    }
    assert (gpu_owners.job_on(1, 1), gpu_owners.job_on(1, 2), gpu_owners.job_on(0, 1)) == ("71", "72", "")
    gpu_owners.files = {}
    assert jobs.look() == {}
    assert gpu_owners.job_on(1, 1) == ""


def test_a_process_on_another_instance_disproves_the_files(gpu_owners: GpuOwners, proc: Path) -> None:
    """What the driver and the kernel see counts, and nothing that was only given is believed beside it."""
    run_by(proc, 10, "71")
    gpu_owners.files = {"71": [SMALL], "72": [OTHER]}
    for instance, jobs in ((1, {0: {"72"}, 1: {"71"}}), (2, {1: {"71"}})):
        gpu_owners.holders = {0: (), 1: (10,), 2: ()}
        gpu_owners.instances = {0: {1: ()}, 1: {1: (), 2: ()} | {instance: (10,)}}
        assert GpuJobs(gpu_owners, proc=proc).look() == jobs
        assert gpu_owners.job_on(1, instance) == "71"
        assert bool(gpu_owners.job_on(0, 1)) is (instance == 1)


def test_a_job_on_the_instance_of_another_contests_that_one_only(gpu_owners: GpuOwners, proc: Path) -> None:
    """The instance of the other stays its own as well, and the third, on which nothing runs, that of its job."""
    run_by(proc, 10, "71")
    run_by(proc, 20, "72")
    gpu_owners.files = {"71": [SMALL], "72": [LARGE], "73": [OTHER]}
    gpu_owners.holders = {0: (), 1: (10, 20), 2: ()}
    gpu_owners.instances = {0: {1: ()}, 1: {1: (10,), 2: (10, 20)}}
    assert GpuJobs(gpu_owners, proc=proc).look() == {0: {"73"}, 1: {"71", "72"}}
    assert gpu_owners.jobs_on == {(0, 1): {"73"}, (1, 1): {"71"}, (1, 2): {"71", "72"}}
    assert gpu_owners.job_on(1, 2) == ""


@pytest.mark.parametrize("files", [("nvidia0",), ("nvidia2", "nvidia-cap12"), ("nvidia1", "nvidia-cap21")])
def test_files_that_do_not_fit_the_driver_say_nothing(
    gpu_owners: GpuOwners, proc: Path, files: tuple[str, ...]
) -> None:
    """A whole GPU that is parted, an instance of one that is not, or one that is not there: nor do those of others."""
    gpu_owners.files = {"71": [files], "72": [LARGE]}
    assert GpuJobs(gpu_owners, proc=proc).look() == {}
    assert gpu_owners.job_on(1, 2) == ""


class Daemon:
    """A slurmd that says which files the node's GPUs have, or why it does not, and counts how often it was asked."""

    def __init__(self, answer: Sequence[Sequence[str]] | SlurmError) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self, node: str) -> Sequence[Sequence[str]]:
        self.asked += 1
        if isinstance(self.answer, SlurmError):
            raise self.answer
        return self.answer


def watched(daemon: Daemon, *, parted: bool = True) -> NodeWatch:
    """A node with three jobs, the last of which has an index that slurmd does not know."""
    jobs = [Job(id, "running", "", "alice", "train", ("n1",), "n1", 0.0, 0.0, None, 0, "x") for id in (71, 72, 73)]
    slurm = FakeSlurm([Node("n1", "mixed")], jobs=jobs)
    slurm.by_gpu = {(71, "n1"): frozenset({2}), (72, "n1"): frozenset({0, 3}), (73, "n1"): frozenset({9})}
    return NodeWatch(slurm, "n1", clock=lambda: 5.0, gres=daemon, has_instances=lambda: parted)


def test_slurmd_is_asked_once_while_the_jobs_stay(gpu_owners: GpuOwners) -> None:
    """What it says is dropped with the rest of an old report."""
    daemon = Daemon((SMALL, OTHER, LARGE, WHOLE))
    watch = watched(daemon)
    report = watch.refresh()
    assert report.files == watch.refresh().files == {"71": [LARGE], "72": [SMALL, WHOLE]}
    assert daemon.asked == 1
    now = 5.0
    collector = SlurmCollector(lambda: report, "n1", clock=lambda: now, gpu_owners=gpu_owners)
    collector.collect()
    assert gpu_owners.files == report.files
    now = 100.0
    collector.collect()
    assert gpu_owners.files == {}


def test_slurmd_is_not_asked_without_instances_and_need_not_answer() -> None:
    """It may not for users other than root; nothing is known of files then."""
    daemon = Daemon((SMALL, OTHER, LARGE, WHOLE))
    assert watched(daemon, parted=False).refresh().files == {}
    assert daemon.asked == 0
    report = watched(Daemon(SlurmDenied("root only"))).refresh()
    assert (report.files, report.problem, len(report.gpus)) == ({}, "", 3)
