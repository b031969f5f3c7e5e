"""How a job ends and what it says at its start, as an ordinary user with the real launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import USER, adapted
from tests.integration.slurm.test_users import ended, folder_of

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(300)]


def submit(cluster: Cluster, folder: Path, does: str, *options: str) -> int:
    """Two nodes and a spare, by the template."""
    script = adapted(
        "train-spares.sbatch", nodes="3", gpus_per_node="", time="", output="job.out", RANKS="1", NODES="2",
        SPARES="1", RUNS=str(folder), OPSD=str(folder / "opsd"), PROGRAM=f"(--no-python sh -c '{does}')",
    )  # fmt: skip
    return CommandSlurm(runner_on(cluster.controller, USER)).submit(script, [f"--chdir={folder}", *options])


@pytest.mark.parametrize(("status", "code", "state"), [(0, 0, "COMPLETED"), (1, 70, "FAILED")])
def test_a_run_without_its_batch_host_ends_its_job(cluster: Cluster, status: int, code: int, state: str) -> None:
    """With its own code, and a chain of afterok goes on or does not."""
    folder = folder_of(cluster, f"end-{code}")
    does = f"until [ -e go ]; do sleep 0.1; done; exit {status}"
    job = submit(cluster, folder, does, "--exclude=n4")
    slurm = CommandSlurm(runner_on(cluster.controller, USER))
    then = slurm.submit("#!/bin/sh\ntrue\n", [f"--dependency=afterok:{job}", "--output=/dev/null"])
    events, log = folder / "train/events.jsonl", folder / "train/job.log"
    wait_until(lambda: events.exists() and "generation_started" in events.read_text(), "the run has begun")
    [found] = slurm.jobs([job])
    try:
        cluster.nodes[found.batch_host].power_off()
        wait_until(lambda: "generation 2 runs on" in log.read_text(), "it goes on with the spare")
        (folder / "go").touch()
        shown = ended(cluster, job, folder)
        assert f"JobState={state}" in shown and f"ExitCode={code}:0" in shown, (shown, log.read_text())
        if code == 0:
            assert "JobState=COMPLETED" in ended(cluster, then, folder)
        else:
            assert slurm.jobs([then])[0].reason in ("DependencyNeverSatisfied", "Dependency")
    finally:
        cluster.restore()


def test_a_job_that_cannot_keep_a_promise_says_so(cluster: Cluster) -> None:
    """At its start, and what resumes the run is what works."""
    folder = folder_of(cluster, "promises")
    script = folder / "job.sbatch"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --no-requeue -N2 --output=job.out --chdir={folder}\nexport OPSD={folder}/opsd\n"
        f"exec $OPSD slurm run --run-id r --runs {folder} --no-python -- sh -c 'sleep 600'\n"
    )
    job = int(cluster.controller.run("sbatch", "--parsable", str(script), user=USER).stdout)
    events = folder / "r/events.jsonl"
    wait_until(lambda: events.exists() and "generation_started" in events.read_text(), "the run has begun")
    checked = cluster.nodes["n4"].run(str(folder / "opsd"), "slurm", "check", f"--job={job}", user=USER, check=False)
    assert checked.returncode == 1
    cluster.controller.run("scancel", "--signal=USR1", str(job))
    shown = ended(cluster, job, folder)
    assert "JobState=FAILED" in shown and "ExitCode=75:0" in shown
    said = (folder / "job.out").read_text()
    for sentence in ("Slurm ends the job once it notices that a node has died", "never put back into the queue"):
        assert said.count(sentence) == checked.stdout.count(sentence) == 1, (said, checked.stdout)
    assert "will restart job" not in said
    assert f"sbatch {script}" in said and "scontrol requeue" not in said


def test_a_heterogeneous_job_is_refused(cluster: Cluster) -> None:
    """Its other parts would stand idle, and Slurm ends it with a node whatever it asks for."""
    folder = folder_of(cluster, "heterogeneous")
    script = f"#!/bin/bash\nexec {folder}/opsd slurm run --runs {folder} --no-python -- true\n"
    parts = ("-N1", "--mem=100", f"--chdir={folder}", "--output=job.out", ":", "-N1", "--mem=100")
    job = cluster.controller.run("sbatch", "--parsable", *parts, user=USER, stdin=script).stdout.strip()
    shown = ended(cluster, job, folder)
    assert "ExitCode=2:0" in shown, shown
    assert "Ask for all nodes in one part" in (folder / "job.out").read_text()
