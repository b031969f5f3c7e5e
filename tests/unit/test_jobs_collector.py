"""Which job has which GPU, and which GPUs idle: by what Slurm, the kernel and the driver say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from opsd.collectors.base import NoData, Reading
from opsd.collectors.jobs import JobsCollector
from opsd.collectors.lib.gpu_owners import RENEW_S, GpuJobs, GpuOwners
from tests.fakes.clock import FakeClock

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
