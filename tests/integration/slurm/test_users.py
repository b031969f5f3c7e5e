"""What ordinary users do with the real launcher on a real Slurm: several of them, arrays, steps within allocations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from opsd.checkpoints import claims
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import SECOND_USER, USER, adapted

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(300)]

OPSD = """#!/bin/sh
export PYTHONPATH={path} HOME={folder}
exec {python} -m opsd "$@"
"""


def folder_of(cluster: Cluster, name: str) -> Path:
    """A folder in which everybody may write, with opsd in it."""
    folder = cluster.shared / name
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "opsd").write_text(OPSD.format(path=":".join(sys.path), folder=folder, python=sys.executable))
    (folder / "opsd").chmod(0o755)
    return folder


def submit(
    cluster: Cluster, folder: Path, *options: str, user: str = USER, nodes: int = 2, does: str = "sleep 1"
) -> int:
    """A job by the template whose ranks do that and say who they are."""
    script = adapted(
        "train-requeue.sbatch", nodes=str(nodes), gpus_per_node="", time="", output="job-%j.out", RANKS="1",
        RUNS=str(folder), OPSD=str(folder / "opsd"), PROGRAM=f"(--no-python sh -c '{does}; echo rank $RANK')",
    )  # fmt: skip
    return CommandSlurm(runner_on(cluster.controller, user)).submit(script, [f"--chdir={folder}", *options])


def ended(cluster: Cluster, job: str | int, folder: Path) -> str:
    """How the job has ended, once it has."""
    shown = ""

    def over() -> bool:
        nonlocal shown
        shown = cluster.controller.run("scontrol", "show", "job", str(job), "--oneliner").stdout
        return not any(f"JobState={state}" in shown for state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"))

    try:
        wait_until(over, "the job has ended")
    except TimeoutError as error:
        said = "".join(path.read_text() for path in folder.glob("*.out"))
        raise TimeoutError(f"{error}: {shown}; {said}") from error
    return shown


def test_the_next_user_of_a_node_can_run_too(cluster: Cluster) -> None:
    """What a finished run leaves in shared memory keeps nobody out: an ordinary user, another one, root.

    How it ended is in the job's comment, or where that is allowed in that of administrators.
    """
    for user in (USER, SECOND_USER, "root"):
        folder = folder_of(cluster, f"of-{user}")
        job = submit(cluster, folder, "--nodelist=n1,n2", user=user)
        shown = ended(cluster, job, folder)
        assert "JobState=COMPLETED" in shown, (folder / f"job-{job}.out").read_text()
        field = "AdminComment" if user == "root" else "Comment"
        assert f" {field}=[opsd run: finished: " in shown, (shown, (folder / f"job-{job}.out").read_text())


def test_a_second_job_of_the_same_name_ends_no_run(cluster: Cluster) -> None:
    """It is refused with a sentence that names the job that has the run, and the first one ends well."""
    folder = folder_of(cluster, "same-name")
    first = submit(cluster, folder, "--nodelist=n1,n2", does="sleep 12")
    events = folder / "train/events.jsonl"
    wait_until(lambda: events.exists() and "generation_started" in events.read_text(), "the first run has begun")
    second = submit(cluster, folder, "--nodelist=n3,n4")
    assert "JobState=FAILED" in (shown := ended(cluster, second, folder)) and "ExitCode=76:0" in shown
    said = (folder / f"job-{second}.out").read_text()
    assert f"is being run by job {first} (running on n1)" in said and "--take-over" in said, said
    assert "JobState=COMPLETED" in ended(cluster, first, folder)
    third = submit(cluster, folder)
    assert "JobState=COMPLETED" in ended(cluster, third, folder), (folder / f"job-{third}.out").read_text()


def test_each_task_of_an_array_is_a_run(cluster: Cluster) -> None:
    """At the same time, on one node each."""
    folder = folder_of(cluster, "array")
    job = submit(cluster, folder, "--array=3-4", nodes=1)
    assert ended(cluster, job, folder).count("JobState=COMPLETED") == 2
    ends = {path.name: claims.newest(path) for path in folder.iterdir() if path.is_dir()}
    assert {name: claim.end.code for name, claim in ends.items() if claim and claim.end} == {"train-3": 0, "train-4": 0}


def test_a_task_of_an_array_is_requeued_alone(cluster: Cluster) -> None:
    """Also the last one, by whose number Slurm's commands take all tasks: the run of the other goes on."""
    folder = folder_of(cluster, "array-requeued")
    last = submit(cluster, folder, "--array=3-4", nodes=1, does="sleep 600")
    slurm = CommandSlurm(runner_on(cluster.controller))

    def began(task: int) -> bool:
        events = folder / f"train-{task}/events.jsonl"
        return events.exists() and "generation_started" in events.read_text()

    wait_until(lambda: began(3) and began(4), "both runs have begun")
    (other,) = (job.id for job in slurm.jobs() if job.id != last)
    cluster.controller.run("scancel", "--signal=USR1", f"{last}_4")
    wait_until(lambda: [job.restarts for job in slurm.jobs([last])] == [1], "the last task is requeued")
    wait_until(lambda: slurm.jobs([last])[0].state == "running", "it runs again")
    assert [(job.restarts, job.state) for job in slurm.jobs([other])] == [(0, "running")]


def test_a_step_smaller_than_its_allocation(cluster: Cluster) -> None:
    """It waits for nobody outside of it."""
    folder = folder_of(cluster, "step")
    step = f"srun -N2 -n2 ./opsd launch --nnodes 2 --run-dir {folder}/run --no-python sh -c 'echo rank $RANK'"
    done = cluster.controller.run(
        "salloc", "-N3", f"--chdir={folder}", "sh", "-c", step, user=USER, check=False, timeout=90
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"rank 0", "rank 1"} <= {line.partition("]: ")[2] or line for line in done.stdout.splitlines()}
