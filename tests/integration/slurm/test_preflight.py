"""`opsd preflight --act` on a node of a real Slurm cluster: a bad node is found and drained, a good one given back."""

from __future__ import annotations

import sys

import pytest

from opsd import exitcodes
from opsd.preflight.report import Report
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import KEEPS_REASON, Cluster, runner_on, wait_until
from tests.integration.slurm.training import make_data

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
    assert not slurm.nodes(["n1"])[0].reason or slurm.version >= KEEPS_REASON
    wait_until(lambda: slurm.nodes(["n1"])[0].usable, "the node is in service again")


@pytest.mark.long
def test_a_run_goes_on_when_a_node_is_lost(cluster: Cluster) -> None:
    """One command on all nodes of a job: one is killed with all it has of the run, and a spare steps in."""
    pytest.importorskip("torch")
    data = make_data(cluster.shared, text_bytes=200_000)
    drill = [
        "preflight", "--set=preflight.gpus=1", f"--set=preflight.shared_dir={cluster.shared}",
        f"--set=agent.state_dir={cluster.shared}/state", "drill", "--train=tiny", f"--train-set=data.shards={data}",
        "--nproc-per-node=1", f"--json={cluster.shared}/drill.json", "--timeout=150",
    ]  # fmt: skip
    python = ["env", f"PYTHONPATH={':'.join(sys.path)}", "OMP_NUM_THREADS=1", sys.executable, "-m", "opsd"]
    srun = ["srun", "--nodes=3", "--ntasks-per-node=1", "--no-kill", "--wait=0", "--kill-on-bad-exit=0"]
    done = cluster.controller.run(*srun, *python, *drill, check=False, timeout=175)
    assert done.returncode == exitcodes.OK, done.stdout + done.stderr
    [result] = Report.from_json((cluster.shared / "drill.json").read_bytes()).results
    assert not [*cluster.shared.glob("opsd-drill-*")], "its checkpoints would fill the shared storage"
    assert result.facts["lost"] not in result.facts["went on with"]
    assert next(value.value for value in result.values if value.measure == "resume") > 0


def test_a_good_node_stays_in_service(cluster: Cluster) -> None:
    """Nothing is done to it."""
    assert preflight(cluster, "n2") == exitcodes.OK
    assert CommandSlurm(runner_on(cluster.controller)).nodes(["n2"])[0].usable
