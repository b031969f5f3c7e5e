"""`opsd preflight --act` on a node of a real Slurm cluster: a bad node is found and drained, a good one given back."""

from __future__ import annotations

import sys

import pytest

from opsd import exitcodes
from opsd.preflight.report import Report
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until

pytestmark = pytest.mark.xdist_group("slurm")


def preflight(cluster: Cluster, node: str, *options: str) -> int:
    """The exit code of a preflight with ``--act`` on ``node``; its report is node.json in the shared folder."""
    host = cluster.nodes[node]
    command = [
        sys.executable,
        "-m",
        "opsd",
        "preflight",
        "--act",
        "--json",
        f"{node}.json",
        "--only=gpu_inventory,numa",
    ]
    settings = [f"--set=agent.node={node}", f"--set=agent.state_dir=/run/opsd-{node}", *options]
    path = f"PYTHONPATH={':'.join(sys.path)}"
    return host.run("env", path, *command, *settings, check=False, timeout=120).returncode


def test_a_bad_node_is_drained_and_given_back_once_it_passes(cluster: Cluster) -> None:
    """A node without the GPUs that it must have goes out of service with its evidence; the same check lets it in."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    assert preflight(cluster, "n1", "--set=preflight.gpus=8") == exitcodes.FAILED
    [node] = slurm.nodes(["n1"])
    assert not node.usable
    assert node.reason.startswith("opsd: preflight quick failed: gpu_inventory; see ")
    assert not Report.from_json((cluster.shared / "n1.json").read_bytes()).passed
    assert preflight(cluster, "n1") == exitcodes.OK
    assert not slurm.nodes(["n1"])[0].reason
    wait_until(lambda: slurm.nodes(["n1"])[0].usable, "the node is in service again")


def test_a_good_node_stays_in_service(cluster: Cluster) -> None:
    """Nothing is done to it."""
    assert preflight(cluster, "n2") == exitcodes.OK
    assert CommandSlurm(runner_on(cluster.controller)).nodes(["n2"])[0].usable
