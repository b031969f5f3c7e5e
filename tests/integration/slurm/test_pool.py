"""The template with a pool of spares, with the real launcher and trainer: a spare is fetched, and joins the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from opsd.slurm.commands import CommandSlurm
from opsd.spares.pool import FILE, SpareState
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until
from tests.integration.slurm.templates import adapted
from tests.integration.slurm.training import Training, make_data

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(300)]

SETTINGS = {"data.batch": 4, "checkpoint.every": 5}


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster of its own, whose hosts are broken."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster


def have_as_spare(cluster: Cluster, name: str, state: SpareState) -> None:
    """Settings on a node by which it is a spare, and what is known of it as one."""
    settings = f'agent.node = "{name}"\nagent.state_dir = "/run"\nspare = {{source = "/fsx", folder = "/scratch"}}\n'
    cluster.nodes[name].run("sh", "-c", "cat > /run/opsd.toml", stdin=settings)
    cluster.nodes[name].run("sh", "-c", f"cat > /run/{FILE}", stdin=json.dumps(asdict(state)))


def test_a_spare_of_the_pool_joins_the_run(own_cluster: Cluster) -> None:
    """The first one has damaged data and says so; an evaluation gives way on the second, and training goes on there."""
    cluster, slurm = own_cluster, CommandSlurm(runner_on(own_cluster.controller))
    training = Training(
        cluster, make_data(cluster.shared, 400_000), "pool", 2, 0, 1000, settings=SETTINGS, pool="train"
    )
    have_as_spare(cluster, "n3", SpareState(lacks={"data": "shard-00000.tokens was damaged"}))
    have_as_spare(cluster, "n4", SpareState(ready=True, expires_at=time.time() + 3600))
    evaluate = adapted("evaluate.sbatch", partition="dev", gpus="", time="")
    (cluster.shared / "evaluate.sbatch").write_text(evaluate)
    asked = ("sbatch", "--parsable", "--nodelist=n4", "--exclusive", "evaluate.sbatch", "sleep", "1000")
    evaluation = int(cluster.controller.run(*asked).stdout)
    training.submit()
    training.until(lambda: training.events("checkpoint_committed"), "a checkpoint")
    assert slurm.jobs([evaluation])[0].state == "running"

    cluster.nodes["n1"].power_off()  # the batch script's node
    training.until(lambda: training.events("resumed"), "the run to go on")
    assert training.places == ["n4", "n2"]
    (refused,) = training.events("spare_refused")
    assert (refused["refused"], refused["reason"]) == ("n3", "data: shard-00000.tokens was damaged")
    (gave_way,) = slurm.jobs([evaluation])
    assert (gave_way.state, gave_way.restarts) == ("pending", 1)
    wait_until(lambda: all(job.nodes != ("n3",) for job in slurm.jobs()), "the damaged spare is the pool's again")
    logs = "".join(log.read_text() for log in (training.folder / "run").glob("spare-*.log"))
    assert "not ready as a spare: data: shard-00000.tokens was damaged" in logs
