"""The included trainer over nodes of a real Slurm cluster: nodes die, the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.slurm import sequences
from tests.integration.slurm.cluster import Cluster, missing
from tests.integration.slurm.training import Training, make_data

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(400)]

SOON = {"checkpoint.every": 5}
CORRUPT_AND_KILL_HEAD = 25
"""A seed for that."""
STEPS = 110
"""More than go by until the second fault where a step takes 0.05 s."""


@pytest.fixture(scope="module")
def trained_on() -> Iterator[tuple[Cluster, Path]]:
    """A cluster of its own, whose hosts are broken, with token shards."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1", "n2", "n3", "n4"]) as cluster:
        yield cluster, make_data(cluster.shared, 400_000)


@pytest.mark.long
def test_two_faults_leave_no_trace_in_the_losses(trained_on: tuple[Cluster, Path]) -> None:
    """The newest checkpoint is damaged and a rank dies, then the node with the leader and the batch script loses power.

    A spare takes over, every loss is as without all that, and the job ends with the run.
    """
    cluster, data = trained_on
    losses = sequences.undisturbed(cluster, data, steps=STEPS)
    faults = sequences.draw(CORRUPT_AND_KILL_HEAD, most=2)
    assert [fault.kind for fault in faults] == ["corrupt_checkpoint", "kill_head"]
    training = sequences.disturbed(cluster, data, "sequence", steps=STEPS)
    assert sequences.play(cluster, training, faults, losses).problems == ()
    assert training.events("node_lost")[0]["lost"] not in training.places


@pytest.mark.long
def test_without_a_spare_the_job_starts_again_on_other_nodes(trained_on: tuple[Cluster, Path]) -> None:
    """The survivor takes the dead node down, requeues the job and has it start at once; the run is resumed."""
    cluster, data = trained_on
    training = Training(cluster, data, "cold", active=2, spares=0, steps=40, settings=SOON)
    job = training.submit()
    training.until_steady()
    victim = next(name for name in training.places if name != training.leader)
    cluster.nodes[victim].power_off()
    training.until(lambda: len(training.events("finished")) == 2, "the end of the second start", 240)
    assert [event["exit_code"] for event in training.events("finished")] == [75, 0]
    assert victim not in training.places
    assert sorted(training.losses()) == list(range(1, 41))
    assert cluster.controller.run("scontrol", "show", "job", str(job)).stdout.count("Restarts=1") == 1
