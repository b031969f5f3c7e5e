"""Users share a node of a real Slurm cluster: the agent there says whose each GPU is, and whose each incident."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.simulated.gpus import STATE_ENV, SimulatedGpus
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until
from tests.integration.slurm.host import Host
from tests.integration.slurm.templates import SECOND_USER, USER

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(180)]

GPUS = 6
SETTINGS = """[agent]
node = "n1"
state_dir = "{folder}/state"
interval_s = 0.5
[nvml]
library = "{library}"
[slurm]
interval_s = 1.0
"""
SLEEP = "#!/bin/sh\nexec sleep 300\n"
SMALL = ("--cpus-per-task=1", "--mem=100", "--output=/dev/null", "--chdir=/tmp")


class Agent:
    """The agent of n1, and what it answers there."""

    def __init__(self, host: Host, config: Path, driver: Path) -> None:
        self.host = host
        environ = (f"PYTHONPATH={':'.join(sys.path)}", f"{STATE_ENV}={driver}", f"PATH={os.environ['PATH']}")
        self.opsd = ("env", *environ, sys.executable, "-m", "opsd")
        self.config = f"--config={config}"

    def ask(self, *command: str) -> dict[str, Any]:
        """The JSON that a command prints; nothing while the agent does not answer."""
        said = self.host.run(*self.opsd, *command, "--json", self.config, check=False, timeout=60)
        return json.loads(said.stdout) if said.returncode == 0 else {}

    def jobs(self) -> dict[str, tuple[str, list[int]]]:
        """User and GPUs of each job."""
        return {job["job"]: (job["user"], job["gpus"]) for job in self.ask("status").get("jobs", ())}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One node."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1"], gpus=GPUS) as cluster:
        yield cluster


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[SimulatedGpus]:
    """Its GPUs."""
    with SimulatedGpus.create(tmp_path / "gpus", count=GPUS) as gpus:
        yield gpus


@pytest.fixture
def agent(cluster: Cluster, driver: SimulatedGpus, tmp_path: Path, library: str) -> Iterator[Agent]:
    """It only observes."""
    config = tmp_path / "opsd.toml"
    config.write_text(SETTINGS.format(folder=tmp_path, library=library))
    agent = Agent(cluster.nodes["n1"], config, tmp_path / "gpus")
    with agent.host.process(*agent.opsd, "agent", agent.config):
        wait_until(lambda: agent.ask("status"), "the agent answers")
        yield agent


def test_each_incident_names_the_job_of_its_gpu(cluster: Cluster, driver: SimulatedGpus, agent: Agent) -> None:
    """Of a job, of both tasks of another user's array, of a suspended job; none for a GPU that nobody has."""
    mine, theirs = (CommandSlurm(runner_on(cluster.controller, user)) for user in (USER, SECOND_USER))
    mine.submit(SLEEP, ["--gres=gpu:2", *SMALL])
    theirs.submit(SLEEP, ["--gres=gpu:1", "--array=1-2", *SMALL])
    halted = mine.submit(SLEEP, ["--gres=gpu:1", *SMALL])
    wait_until(lambda: [job.state for job in mine.jobs()] == ["running"] * 4, "all jobs run")
    cluster.controller.run("scontrol", "suspend", str(halted))
    users = {str(job.id): job.user for job in mine.jobs()}
    assert sorted(users.values()) == sorted([USER, USER, SECOND_USER, SECOND_USER])

    def known() -> bool:
        return {job: user for job, (user, _) in agent.jobs().items()} == users

    wait_until(known, "the agent knows the jobs of all GPUs")
    job_of = {gpu: job for job, (_, gpus) in agent.jobs().items() for gpu in gpus}
    assert len(job_of) == GPUS - 1
    for gpu in driver:
        gpu.raise_xid(79)

    def told() -> dict[int, str]:
        found = agent.ask("incidents", "list").get("incidents", ())
        return {one["culprit"]["gpu"]: one["job"] for one in found if one["kind"] == "gpu_xid"}

    wait_until(lambda: len(told()) == GPUS, "an incident of each GPU")
    assert told() == {gpu: job_of.get(gpu, "") for gpu in range(GPUS)}
