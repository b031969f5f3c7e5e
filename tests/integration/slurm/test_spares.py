"""`opsd spare` on a real Slurm cluster."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from opsd import exitcodes
from opsd.preflight.checks import CHECKS
from opsd.slurm import node_comment
from opsd.slurm.commands import CommandSlurm
from opsd.spares import pool
from tests.fakes.posttrain import make_corpus
from tests.integration.slurm.cluster import Cluster, runner_on

pytestmark = pytest.mark.xdist_group("slurm")

POOL = "opsd_spares"
QUICK = [check.name for check in CHECKS if check.name != "numa"]


@pytest.fixture
def slurm(cluster: Cluster) -> CommandSlurm:
    """The port on the controller."""
    return CommandSlurm(runner_on(cluster.controller))


def opsd(cluster: Cluster, node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with its settings on ``node``: source in the shared folder, target on the node's own disk."""
    settings = {
        "agent.node": node, "agent.state_dir": f"/run/opsd-{node}", "spare.source": cluster.shared / "corpus",
        "spare.folder": "/run/shards", "preflight.skip": QUICK,
    }  # fmt: skip
    options = [f"--set={key}={value}" for key, value in settings.items()]
    command = ("env", f"PYTHONPATH={':'.join(sys.path)}", sys.executable, "-m", "opsd")
    group, *rest = arguments
    return cluster.nodes[node].run(*command, group, *options, *rest, check=False, timeout=120)


def spares(slurm: CommandSlurm) -> list[pool.Spare]:
    """The pool as `opsd spare list` has it."""
    return pool.pool(slurm, POOL, 3600.0, time.time())


def test_a_spare_becomes_ready_is_listed_and_released(cluster: Cluster, slurm: CommandSlurm) -> None:
    """Its readiness is an attribute in Slurm that every node can read; it ends with a release."""
    make_corpus(cluster.shared / "corpus")
    assert opsd(cluster, "n1", "preflight", "--profile=spare", "--quiet").returncode == exitcodes.OK
    staged = opsd(cluster, "n1", "spare", "stage")
    assert (staged.returncode, "n1 is a ready spare until" in staged.stdout) == (exitcodes.OK, True), staged.stderr
    assert node_comment.read(slurm.comments()["n1"]).spare == "ready"
    listed = opsd(cluster, "n2", "spare", "list")
    assert (listed.returncode, listed.stdout.startswith("n1  ready, verified ")) == (exitcodes.OK, True)

    cluster.nodes["n1"].run("sh", "-c", "echo rotten > /run/shards/shard-00000.tokens")
    assert opsd(cluster, "n1", "spare", "verify").returncode == exitcodes.FAILED
    (spare,) = spares(slurm)
    assert (spare.ready, "it lacks data since" in spare.why_not) == (False, True)

    assert opsd(cluster, "n1", "spare", "release", "--delete").returncode == exitcodes.OK
    assert set(slurm.comments().values()) == {""}


def test_a_spare_that_passes_is_marked_ready_by_its_preflight(cluster: Cluster, slurm: CommandSlurm) -> None:
    """With --act, where nothing has to be staged; one that fails is drained and not ready."""
    command = ("preflight", "--profile=spare", "--act", "--set=spare.source=", "--set=spare.folder=")
    passed = opsd(cluster, "n3", *command)
    assert (passed.returncode, "n3 is a ready spare until" in passed.stdout) == (exitcodes.OK, True), passed.stderr
    assert node_comment.read(slurm.comments()["n3"]).spare == "ready"
    failed = opsd(cluster, "n3", *command, "--only=numa,gpu_inventory", "--set=preflight.gpus=8")
    assert (failed.returncode, "not a ready spare; preflight: it failed" in failed.stdout) == (exitcodes.FAILED, True)
    assert node_comment.read(slurm.comments()["n3"]).spare == "preflight"
    assert opsd(cluster, "n3", *command).returncode == exitcodes.OK
    assert node_comment.read(slurm.comments()["n3"]).spare == "ready"
    assert opsd(cluster, "n3", "spare", "release").returncode == exitcodes.OK


def test_the_pool_is_a_reservation(slurm: CommandSlurm) -> None:
    """Slurm keeps the nodes free; they are spares before they have said anything, and not ready."""
    assert spares(slurm) == []
    pool.reserve(slurm, POOL, count=2, partition="train", users="root")
    (reserved,) = slurm.reservations()
    assert (len(reserved.nodes), "REPLACE_DOWN" in reserved.flags) == (2, True)
    found = spares(slurm)
    assert [spare.node for spare in found] == list(reserved.nodes)
    assert all("it has not said that it is ready" in spare.why_not for spare in found)
    pool.mark(slurm, found[0].node, "ready", time.time())
    assert [spare.ready for spare in spares(slurm)] == [True, False]
    slurm.unreserve(POOL)
