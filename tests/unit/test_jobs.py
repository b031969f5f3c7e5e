"""Which job has which GPU or instance of MIG, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from opsd.agent.collectors import NodeWatch
from opsd.agent.loop import Snapshot
from opsd.agent.web import api
from opsd.agent.web.api import cost_text, jobs_on_gpus
from opsd.collectors.base import NoData, Reading, Sample
from opsd.collectors.jobs import IDLE, JobsCollector
from opsd.collectors.lib.gpu_owners import RENEW_S, GpuJobs, GpuOwners, MigDevices, has_instances
from opsd.collectors.lib.rank_series import JOB_INFO
from opsd.collectors.slurm import JOB, SlurmCollector
from opsd.slurm import gres_devices
from opsd.slurm.port import Job, Node, SlurmDenied, SlurmError, SlurmRejected
from opsd.slurm.runner import Output
from tests.fakes.clock import FakeClock
from tests.fakes.nvml import samples
from tests.fakes.slurm import FakeSlurm
from tests.unit.test_page import Structure, page, snapshot

# Which job has which GPU, and which GPUs idle: by what Slurm, the kernel and the driver say.


ADA, BOB = 1001, 1002

V2 = "0::/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0\n"

V1 = "9:devices:/slurm/uid_1001/job_{}/step_0\n0::/\n"

Process = Callable[..., None]


@pytest.fixture
def gpu_owners() -> GpuOwners:
    """Ada's job 71 and Bob's 72 on a node with four GPUs."""
    gpu_owners = GpuOwners()
    gpu_owners.jobs = {"71": ADA, "72": BOB}
    gpu_owners.holders = dict.fromkeys(range(4), ())
    return gpu_owners


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """Adds or replaces a process in a procfs of its own."""

    def add(pid: int, user: int, groups: str = "0::/\n", environment: bytes = b"", start: int = 100) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} (py) R {' 0' * 18} {start} 0")
        (folder / "status").write_text(f"Name:\tpy\nUid:\t{user}\t{user}\t{user}\t{user}\n")
        (folder / "cgroup").write_text(groups)
        (folder / "environ").write_bytes(environment)

    return add


@pytest.fixture
def jobs(gpu_owners: GpuOwners, tmp_path: Path, clock: FakeClock) -> GpuJobs:
    return GpuJobs(gpu_owners, proc=tmp_path, clock=clock.monotonic)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def of(**gpus: set[str]) -> Mapping[int, frozenset[str]]:
    """``gpu0={"71"}`` and so on."""
    return {int(name.removeprefix("gpu")): frozenset(jobs) for name, jobs in gpus.items()}


def test_the_control_group_of_who_holds_a_gpu_names_its_job(
    gpu_owners: GpuOwners, process: Process, jobs: GpuJobs
) -> None:
    """Both versions of control groups, with number or SLUID, two users on one node, and a process of no job."""
    gpu_owners.holders = {0: (10, 11), 1: (10,), 2: (20,), 3: (30, 31)}
    gpu_owners.sluids = {"sEKNKTV3WPV500": "72"}
    process(10, ADA, V2.format(71))
    process(11, ADA, V2.format(71))
    process(20, BOB, V1.format(72))
    process(30, 0)
    process(31, BOB, "0::/system.slice/slurmstepd.scope/sEKNKTV3WPV500/step_0/user/task_0\n", b"SLURM_JOB_ID=73\0")
    assert jobs.look() == of(gpu0={"71"}, gpu1={"71"}, gpu2={"72"}, gpu3={"72"})


def test_a_sluid_that_slurm_has_not_told_leaves_the_environment(
    gpu_owners: GpuOwners, process: Process, jobs: GpuJobs
) -> None:
    """As outside of a control group: the job that it names counts if Slurm runs it for this user."""
    gpu_owners.holders = {0: (20,)}
    process(20, BOB, "0::/system.slice/slurmstepd.scope/sEKNKTV3WPV500/step_0/user/task_0\n", b"SLURM_JOB_ID=72\0")
    assert jobs.look() == of(gpu0={"72"})


def test_without_control_groups_the_environment_counts_if_slurm_agrees(
    gpu_owners: GpuOwners, process: Process, jobs: GpuJobs
) -> None:
    """A user may write any number there: one of another user's jobs, or of one that does not run here, is nobody's."""
    gpu_owners.holders = {0: (10,), 1: (20,), 2: (21,), 3: (22,)}
    process(10, ADA, environment=b"HOME=/\0SLURM_JOB_ID=71\0")
    process(20, BOB, environment=b"SLURM_JOB_ID=71\0")
    process(21, BOB, environment=b"SLURM_JOB_ID=99\0")
    process(22, BOB, environment=b"SLURM_JOB_ID=72\n\0")
    assert jobs.look() == of(gpu0={"71"})


def test_slurms_word_counts_where_nothing_runs_yet(gpu_owners: GpuOwners, process: Process, jobs: GpuJobs) -> None:
    """Allocated GPUs belong to the job before a process holds them."""
    gpu_owners.holders = {0: (), 1: (10,), 2: (), 3: ()}
    gpu_owners.allocated = {"71": frozenset({0, 1}), "72": frozenset({3})}
    process(10, ADA, V2.format(71))
    assert jobs.look() == of(gpu0={"71"}, gpu1={"71"}, gpu3={"72"})


@pytest.mark.parametrize(("of_71", "of_72"), [({2, 3}, {1}), ({0}, {9, 10})], ids=["another order", "MIG"])
def test_slurms_numbers_are_not_believed_where_they_are_not_the_drivers(
    gpu_owners: GpuOwners, process: Process, jobs: GpuJobs, of_71: set[int], of_72: set[int]
) -> None:
    """One job that is seen elsewhere, or has more than there are, says so of all: the other has no process yet."""
    gpu_owners.holders = {0: (10,), 1: (), 2: (), 3: ()}
    gpu_owners.allocated = {"71": frozenset(of_71), "72": frozenset(of_72)}
    process(10, ADA, V2.format(71))
    assert jobs.look() == of(gpu0={"71"})


@pytest.mark.parametrize(
    ("of_71", "found"),
    [
        ({0, 1}, {0: {"71"}, 1: {"71", "72"}, 2: {"73"}}),
        ({0, 3}, {0: {"71"}, 1: {"72"}, 2: {"73"}, 3: {"71"}}),
        ({1}, {0: {"71"}, 1: {"71", "72"}, 2: {"73"}}),
        ({0, 1, 2, 3}, {0: {"71"}, 1: {"71", "72"}, 2: {"71", "73"}, 3: {"71"}}),
    ],
    ids=["besides its own", "on one of nobody", "in place of its own", "on all"],
)
def test_a_job_on_the_gpu_of_another_contests_that_one_only(
    gpu_owners: GpuOwners, process: Process, jobs: GpuJobs, of_71: set[int], found: Mapping[int, set[str]]
) -> None:
    """Without ConstrainDevices nothing keeps it off: both have that GPU, and the others theirs, begun on it or not.
    A rank page that claims a GPU changes none of it.
    """
    gpu_owners.holders = {gpu: (10,) * (gpu in of_71) + (20,) * (gpu == 1) for gpu in range(4)}
    gpu_owners.jobs = {**gpu_owners.jobs, "73": BOB}
    gpu_owners.allocated = {"71": frozenset({0}), "72": frozenset({1}), "73": frozenset({2})}
    gpu_owners.ranked = frozenset({(3, "72"), (0, "73")})
    process(10, ADA, V2.format(71))
    process(20, BOB, V2.format(72))
    assert jobs.look() == found


@pytest.mark.parametrize("at_home", [0, 1, 2])
def test_most_gpus_say_whether_slurm_counts_as_the_driver_does(
    gpu_owners: GpuOwners, process: Process, jobs: GpuJobs, at_home: int
) -> None:
    """A job on a free GPU in place of its own has strayed, or Slurm has another order: the other jobs decide."""
    gpu_owners.holders = {0: (), 1: (20,) * (at_home > 0), 2: (30,) * (at_home > 1), 3: (10,), 4: ()}
    gpu_owners.allocated = {str(71 + gpu): frozenset({gpu}) for gpu in (0, 1, 2)} | {"75": frozenset({4})}
    for job in (71, 72, 73):
        process((job - 70) * 10, ADA, V2.format(job))
    seen = {3: {"71"}, **{gpu: {str(71 + gpu)} for gpu in (1, 2)[:at_home]}}
    assert jobs.look() == ({0: {"71"}, **seen, 4: {"75"}} if at_home == 2 else seen)


def test_gpus_that_have_changed_places_are_another_order(
    gpu_owners: GpuOwners, process: Process, jobs: GpuJobs
) -> None:
    """As many say so as not: the GPU of the job that has not begun is not known."""
    gpu_owners.holders = {0: (20,), 1: (10,), 2: (30,), 3: ()}
    gpu_owners.allocated = {str(71 + gpu): frozenset({gpu}) for gpu in range(4)}
    for job in (71, 72, 73):
        process((job - 70) * 10, ADA, V2.format(job))
    assert jobs.look() == of(gpu0={"72"}, gpu1={"71"}, gpu2={"73"})


def test_slurm_counts_instances_where_a_gpu_has_mig(gpu_owners: GpuOwners, jobs: GpuJobs) -> None:
    """Its indexes may be those of GPUs all the same, and no job has a process yet that would be seen elsewhere."""
    gpu_owners.holders = {0: (), 1: ()}
    gpu_owners.allocated, gpu_owners.instances = {"71": frozenset({1})}, {0: {1: (), 2: ()}}
    assert jobs.look() == {}


def test_several_jobs_may_share_a_gpu(gpu_owners: GpuOwners, process: Process, jobs: GpuJobs) -> None:
    """As with MIG instances of one GPU."""
    gpu_owners.holders = {0: (10, 20)}
    process(10, ADA, V2.format(71))
    process(20, BOB, V2.format(72))
    assert jobs.look() == of(gpu0={"71", "72"})


def test_a_process_is_looked_up_once(gpu_owners: GpuOwners, process: Process, jobs: GpuJobs, clock: FakeClock) -> None:
    """Until it has been known for a while, or another one has its number."""
    gpu_owners.holders = {0: (10,)}
    process(10, ADA, V2.format(71))
    assert jobs.look() == of(gpu0={"71"})
    process(10, ADA, V2.format(73))
    assert jobs.look() == of(gpu0={"71"})
    clock.advance(RENEW_S)
    assert jobs.look() == of(gpu0={"73"})
    process(10, BOB, V2.format(72), start=200)
    assert jobs.look() == of(gpu0={"72"})


def test_a_process_that_is_gone_holds_nothing(gpu_owners: GpuOwners, jobs: GpuJobs) -> None:
    """The driver may list it for a moment longer."""
    gpu_owners.holders = {0: (12345,)}
    assert jobs.look() == {}


def series(reading: Reading | NoData) -> dict[tuple[str, ...], float]:
    assert isinstance(reading, Reading)
    return {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples}


def test_idle_time_begins_when_the_job_came_or_the_gpu_last_worked(
    gpu_owners: GpuOwners, jobs: GpuJobs, clock: FakeClock
) -> None:
    """Whichever is later; a GPU that does not tell its use has no such series."""
    collector = JobsCollector(gpu_owners, jobs, clock=clock.monotonic)
    gpu_owners.worked = {0: 400.0, 1: 400.0}
    gpu_owners.allocated = {"71": frozenset({0, 1, 2})}
    assert series(collector.collect())["opsd_gpu_job_idle_seconds", "0", "71"] == 0
    clock.advance(100)
    gpu_owners.worked = {0: 400.0, 1: 1090.0}
    got = series(collector.collect())
    assert got["opsd_gpu_job_idle_seconds", "0", "71"] == 100
    assert got["opsd_gpu_job_idle_seconds", "1", "71"] == 10
    assert ("opsd_gpu_job_idle_seconds", "2", "71") not in got
    gpu_owners.allocated = {"72": frozenset({0})}
    assert series(collector.collect())["opsd_gpu_job_idle_seconds", "0", "72"] == 0


def test_a_part_of_a_gpu_is_never_idle(gpu_owners: GpuOwners, jobs: GpuJobs, clock: FakeClock) -> None:
    """Others may have the rest of it; whose it is, is told all the same (gres/shard, gres/mps)."""
    collector = JobsCollector(gpu_owners, jobs, clock=clock.monotonic)
    gpu_owners.worked = {0: 400.0, 1: 400.0}
    gpu_owners.allocated = {"71": frozenset({0, 1}), "72": frozenset({0})}
    gpu_owners.shares = {"71": frozenset({0}), "72": frozenset({0})}
    got = series(collector.collect())
    assert {name[1:3] for name in got if name[0] == "opsd_gpu_job_info"} == {("0", "71"), ("1", "71"), ("0", "72")}
    assert {name[1:3] for name in got if name[0] == "opsd_gpu_job_idle_seconds"} == {("1", "71")}


def test_a_gpu_with_a_rank_page_has_its_info_from_there(gpu_owners: GpuOwners, jobs: GpuJobs) -> None:
    """So that a join on the GPU finds one series."""
    gpu_owners.allocated = {"71": frozenset({0, 1})}
    gpu_owners.ranked = frozenset({(0, "71")})
    infos = [name for name in series(JobsCollector(gpu_owners, jobs).collect()) if name[0] == "opsd_gpu_job_info"]
    assert infos == [("opsd_gpu_job_info", "1", "71", "", "")]


def test_without_gpus_there_is_nothing_to_tell() -> None:
    """Neither healthy nor an error."""
    assert JobsCollector(GpuOwners()).collect() == NoData("the driver has told of no GPU of this node")


# Whose an instance of MIG is while nothing runs on it: by what Slurm gave each job, and the files that open it.


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
def mig_owners() -> GpuOwners:
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


def test_a_job_has_its_instance_before_anything_runs_on_it(mig_owners: GpuOwners, proc: Path) -> None:
    """Two jobs on one GPU, one on a whole GPU; an instance of nobody stays nobody's."""
    mig_owners.files = {"71": [SMALL], "72": [LARGE], "73": [WHOLE]}
    jobs = GpuJobs(mig_owners, proc=proc)
    told = {key for key in samples(JobsCollector(mig_owners, jobs).collect()) if key[0] != "opsd_gpu_job_idle_seconds"}
    assert told == {
        ("opsd_gpu_job_info", "1", "71", "", ""),
        ("opsd_gpu_job_info", "1", "72", "", ""),
        ("opsd_gpu_job_info", "2", "73", "", ""),
        ("opsd_mig_job_info", "1", "1", "71"),
        ("opsd_mig_job_info", "1", "2", "72"),
    }
    assert (mig_owners.job_on(1, 1), mig_owners.job_on(1, 2), mig_owners.job_on(0, 1)) == (
        "71",
        "72",
        "",
    )
    mig_owners.files = {}
    assert jobs.look() == {}
    assert mig_owners.job_on(1, 1) == ""


def test_a_process_on_another_instance_disproves_the_files(mig_owners: GpuOwners, proc: Path) -> None:
    """What the driver and the kernel see counts, and nothing that was only given is believed beside it."""
    run_by(proc, 10, "71")
    mig_owners.files = {"71": [SMALL], "72": [OTHER]}
    for instance, jobs in ((1, {0: {"72"}, 1: {"71"}}), (2, {1: {"71"}})):
        mig_owners.holders = {0: (), 1: (10,), 2: ()}
        mig_owners.instances = {0: {1: ()}, 1: {1: (), 2: ()} | {instance: (10,)}}
        assert GpuJobs(mig_owners, proc=proc).look() == jobs
        assert mig_owners.job_on(1, instance) == "71"
        assert bool(mig_owners.job_on(0, 1)) is (instance == 1)


def test_a_job_on_the_instance_of_another_contests_that_one_only(mig_owners: GpuOwners, proc: Path) -> None:
    """The instance of the other stays its own as well, and the third, on which nothing runs, that of its job."""
    run_by(proc, 10, "71")
    run_by(proc, 20, "72")
    mig_owners.files = {"71": [SMALL], "72": [LARGE], "73": [OTHER]}
    mig_owners.holders = {0: (), 1: (10, 20), 2: ()}
    mig_owners.instances = {0: {1: ()}, 1: {1: (10,), 2: (10, 20)}}
    assert GpuJobs(mig_owners, proc=proc).look() == {0: {"73"}, 1: {"71", "72"}}
    assert mig_owners.jobs_on == {(0, 1): {"73"}, (1, 1): {"71"}, (1, 2): {"71", "72"}}
    assert mig_owners.job_on(1, 2) == ""


@pytest.mark.parametrize("files", [("nvidia0",), ("nvidia2", "nvidia-cap12"), ("nvidia1", "nvidia-cap21")])
def test_files_that_do_not_fit_the_driver_say_nothing(
    mig_owners: GpuOwners, proc: Path, files: tuple[str, ...]
) -> None:
    """A whole GPU that is parted, an instance of one that is not, or one that is not there: nor do those of others."""
    mig_owners.files = {"71": [files], "72": [LARGE]}
    assert GpuJobs(mig_owners, proc=proc).look() == {}
    assert mig_owners.job_on(1, 2) == ""


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


def test_slurmd_is_asked_once_while_the_jobs_stay(mig_owners: GpuOwners) -> None:
    """What it says is dropped with the rest of an old report."""
    daemon = Daemon((SMALL, OTHER, LARGE, WHOLE))
    watch = watched(daemon)
    report = watch.refresh()
    assert report.files == watch.refresh().files == {"71": [LARGE], "72": [SMALL, WHOLE]}
    assert daemon.asked == 1
    now = 5.0
    collector = SlurmCollector(lambda: report, "n1", clock=lambda: now, gpu_owners=mig_owners)
    collector.collect()
    assert mig_owners.files == report.files
    now = 100.0
    collector.collect()
    assert mig_owners.files == {}


def test_slurmd_is_not_asked_without_instances_and_need_not_answer() -> None:
    """It may not for users other than root; nothing is known of files then."""
    daemon = Daemon((SMALL, OTHER, LARGE, WHOLE))
    assert watched(daemon, parted=False).refresh().files == {}
    assert daemon.asked == 0
    report = watched(Daemon(SlurmDenied("root only"))).refresh()
    assert (report.files, report.problem, len(report.gpus)) == ({}, "", 3)


# What the API and the pages say about Slurm's jobs on the GPUs.


SAMPLES = (
    Sample(JOB, 1.0, ("72", "bob", "gpu", "running")),
    Sample(JOB_INFO, 1.0, ("1", "72", "", "")),
    Sample(JOB_INFO, 1.0, ("0", "72", "", "")),
    Sample(JOB_INFO, 1.0, ("3", "8", "smol", "0")),
    Sample(JOB_INFO, 1.0, ("2", "", "other", "0")),
    Sample(IDLE, 7200.0, ("1", "72")),
    Sample(IDLE, 3.0, ("0", "72")),
)


def test_each_job_has_its_owner_gpus_and_idle_gpus() -> None:
    """Whether it has rank pages or not; a run outside Slurm is no job."""
    first, second = jobs_on_gpus(Snapshot(1, 0.0, 0.0, samples=(SAMPLES,)))
    assert (first.job, first.user, first.gpus, first.idle_s) == ("8", "", (3,), {})
    assert (second.job, second.user, second.partition, second.gpus) == ("72", "bob", "gpu", (0, 1))
    assert (second.idle_s, second.idle_gpu_hours) == ({1: 7200.0}, 2.0)


def test_idle_gpu_hours_have_a_price_where_one_is_known() -> None:
    """The price comes from the agent's configuration."""
    assert cost_text(2.0, {"gpu_hour": 2.5, "currency": "EUR"}) == "2.0 GPU-hours, 5.00 EUR"
    assert cost_text(2.0, {"gpu_hour": 0.0, "currency": "EUR"}) == "2.0 GPU-hours"


def test_the_status_and_the_page_show_them() -> None:
    """The same jobs in both."""
    shown = snapshot(samples=(SAMPLES,))
    answer = json.loads(api.encode(api.status(shown, {}, 0.0)))
    assert [job["idle_s"] for job in answer["jobs"]] == [{}, {"1": 7200.0}]
    assert "bob" in Structure(page(shown)).text
