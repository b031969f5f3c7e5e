"""One Slurm cluster for all tests of this folder, and a clean one for every test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import SlurmRejected
from tests.integration.slurm.cluster import FAST, Cluster, missing, runner_on, wait_until

PATIENT = {**FAST, "TCPTimeout": "2"}
"""A first packet that is lost or late on a busy machine is sent again after a second, when 1 has already failed."""


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """The cluster, brought up once."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(settings=PATIENT) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with all nodes free; what a test left behind on it is cleaned up after it."""
    yield running_cluster
    slurm = CommandSlurm(runner_on(running_cluster.controller))
    wait_until(lambda: _clean(slurm), "all nodes free again")


def _clean(slurm: CommandSlurm) -> bool:
    """Cancel, delete and resume what there is; True once nothing is left to do."""
    for reservation in slurm.reservations():
        slurm.unreserve(reservation.name)
    for job in slurm.jobs():
        slurm.cancel(job.id)
    for name in (name for name, comment in slurm.comments().items() if comment):
        slurm.set_comment(name, "")
    nodes = slurm.nodes()
    if held := [node.name for node in nodes if node.state == "down" or "drain" in node.flags]:
        # A node may come back by itself in between, and then there is nothing to resume.
        with suppress(SlurmRejected):
            slurm.update_nodes(held, "resume")
    return all(node.free for node in nodes)
