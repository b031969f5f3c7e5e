"""The switch tree made from the fabric, on a real Slurm that has none, and on one that is given it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from opsd import exitcodes
from opsd.slurm import leaf_paths
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.topology import parse
from tests.fakes.fabric import printed
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until

pytestmark = pytest.mark.xdist_group("slurm")

RAILS = [(f"H-{node}{rail}", f"S-a{(node - 1) // 2}{rail}") for node in range(1, 5) for rail in range(2)]
UP = [(f"S-a{unit}{rail}", "S-b") for unit in range(2) for rail in range(2)]
DESCRIBED = {f"S-a{unit}{rail}": f"MF0;su{unit}-r{rail}:MQM9700/U1" for unit in range(2) for rail in range(2)}
ADAPTERS = {f"H-{node}{rail}": f"n{node} mlx5_{rail}" for node in range(1, 5) for rail in range(2)}
FABRIC = printed([*RAILS, *UP], {"S-b": "Quantum Mellanox Technologies", **DESCRIBED, **ADAPTERS})


def opsd_nodes(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    told = f"PYTHONPATH={':'.join(sys.path)}", f"OPSD_TOPOLOGY={cluster.shared}/measured.conf"
    command = ("env", *told, sys.executable, "-m", "opsd", "nodes", *arguments)
    return cluster.nodes["n1"].run(*command, check=False, timeout=60)


def test_a_pick_goes_by_the_fabric_and_around_a_bad_way(cluster: Cluster) -> None:
    """TopologyPlugin is none: two nodes below one leaf; three of which a way is bad name it, two avoid it."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    (cluster.shared / "fabric").write_text(FABRIC)
    made = opsd_nodes(cluster, "topology", f"{cluster.shared}/fabric", f"--output={cluster.shared}/measured.conf")
    assert (made.returncode, made.stdout) == (exitcodes.OK, ""), made.stderr
    assert "4 nodes below 2 leaf switches or groups of them" in made.stderr
    one, other = "su0-r0_and_1_more", "su1-r0_and_1_more"
    apart = cluster.shared / "apart.conf"
    apart.write_text("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\n")
    refused = opsd_nodes(cluster, "pick", "3", f"--topology={apart}")
    assert (refused.returncode, refused.stdout) == (exitcodes.FAILED, "")
    assert "below switches that are not connected (a, b), 3 are wanted" in refused.stderr
    slurm.update_nodes(["n2"], "drain", "a fan")
    near = opsd_nodes(cluster, "pick", "2")
    assert (near.stdout, f"all below switch {other}" in near.stderr) == ("n[3-4]\n", True)
    slurm.update_nodes(["n4"], "drain", "a fan")
    far = opsd_nodes(cluster, "pick", "2")
    assert (far.stdout, "all below switch switch-b" in far.stderr, "was bad" in far.stderr) == ("n[1,3]\n", True, False)
    tree = parse((cluster.shared / "measured.conf").read_text())
    leaf_paths.note(slurm, ("n2", "n4"), tree.leaf, time.time(), passed=False, rate=2.5e9)
    forced = opsd_nodes(cluster, "pick", "2")
    assert forced.stdout == "n[1,3]\n"
    assert f"the way between {one} and {other} was bad when last measured (2.5 GB/s, " in forced.stderr
    slurm.update_nodes(["n2"], "resume")
    wait_until(lambda: slurm.nodes(["n2"])[0].free, "n2 is free again")
    around = json.loads(opsd_nodes(cluster, "pick", "2", "--json").stdout)
    assert (around["hostlist"], around["bad_ways"]) == ("n[1-2]", [])
    three = json.loads(opsd_nodes(cluster, "pick", "3", "--json").stdout)
    assert [way["leaves"] for way in three["bad_ways"]] == [[one, other]]


def test_slurm_takes_the_file_as_its_own() -> None:
    """What its controller shows of it is the same tree, with which it starts a job."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(("n1", "n2", "n3")) as bare:
        (bare.shared / "fabric").write_text(FABRIC)
        made = opsd_nodes(bare, "topology", f"{bare.shared}/fabric")
    assert made.returncode == exitcodes.OK
    with Cluster(("n1", "n2", "n3"), topology=made.stdout) as cluster:
        shown = cluster.controller.run("scontrol", "show", "topology").stdout
        assert parse(shown) == parse(made.stdout)
        assert [parse(shown).hops("n1", node) for node in ("n2", "n3")] == [1, 3]
        ran = cluster.nodes["n3"].run("srun", "--nodes=2", "--switches=1", "hostname", timeout=60).stdout
        assert sorted(ran.split()) == ["n1", "n2"]
        cluster.nodes["n3"].run("srun", "--nodes=3", "true", timeout=60)
