"""One Slurm cluster for all tests of this folder, and a clean one for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """The cluster, brought up once."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with all nodes idle; what a test left behind on it is cleaned up after it."""
    yield running_cluster
    slurm = CommandSlurm(runner_on(running_cluster.controller))
    for reservation in slurm.reservations():
        slurm.unreserve(reservation.name)
    for job in slurm.jobs():
        slurm.cancel(job.id)
    if held := [node.name for node in slurm.nodes() if node.state == "down" or "drain" in node.flags]:
        slurm.update_nodes(held, "resume")
    wait_until(lambda: all(node.state == "idle" and node.usable for node in slurm.nodes()), "all nodes idle again")
