"""`opsd nodes` on a real Slurm cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from opsd import exitcodes
from opsd.lemons import NodeFailure
from opsd.slurm import job_faults, leaf_paths, node_comment
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.job_faults import FIRST_S, FailedJobs
from opsd.slurm.node_comment import NodeHistory, Stay
from opsd.slurm.port import SlurmRejected
from opsd.slurm.topology import parse
from tests.fakes.clock import FakeClock
from tests.integration.slurm.cluster import Cluster, runner_on

pytestmark = pytest.mark.xdist_group("slurm")


def opsd_nodes(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("env", f"PYTHONPATH={':'.join(sys.path)}", sys.executable, "-m", "opsd", "nodes", *arguments)
    return cluster.nodes["n1"].run(*command, check=False, timeout=60)


def test_nodes_are_picked_by_what_slurm_knows(cluster: Cluster) -> None:
    """Idle ones below one switch, tested ones first; a drained node and a spare are left out."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    tree = cluster.shared / "topology.conf"
    tree.write_text("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\nSwitchName=s Switches=a,b\n")
    first = opsd_nodes(cluster, "pick", "2", f"--topology={tree}")
    assert (first.returncode, first.stdout) == (exitcodes.OK, "n[1-2]\n")
    assert "2 nodes of partition train, all below switch a" in first.stderr
    slurm.set_comment("n3", node_comment.write("rack 12", NodeHistory(tested_at=time.time() - 60)))
    tested = json.loads(opsd_nodes(cluster, "pick", "2", "--json", f"--topology={tree}").stdout)
    assert (tested["hostlist"], tested["switch"]) == ("n[3-4]", "b")
    assert tested["remarks"] == {"n4": ["not tested in the last 30 days"]}
    slurm.set_comment("n4", node_comment.write("", NodeHistory(spare="ready", spare_at=time.time())))
    slurm.update_nodes(["n2"], "drain", "a fan")
    few = opsd_nodes(cluster, "pick", "3", f"--topology={tree}")
    assert few.returncode == exitcodes.FAILED
    told = "3 are wanted (n2: Slurm has it as idle+drain; n4: it is a spare)"
    assert f"2 of 4 nodes can be had now in 2 partitions, of which a job has one, {told}" in few.stderr


def test_nodes_of_a_partition_that_starts_no_jobs_are_not_picked(cluster: Cluster) -> None:
    """A job would wait there for ever; nor are nodes of two partitions picked, which no job has."""
    cluster.controller.run("scontrol", "update", "PartitionName=train", "State=DOWN")
    try:
        down = opsd_nodes(cluster, "pick", "1", "--partition=train")
        assert down.returncode == exitcodes.FAILED
        assert "partition train is down, so no job starts there" in down.stderr
        other = opsd_nodes(cluster, "pick", "1")
        assert "1 nodes of partition dev" in other.stderr
    finally:
        cluster.controller.run("scontrol", "update", "PartitionName=train", "State=UP")


def test_nodes_that_told_the_same_nvlink_domain_are_picked(cluster: Cluster) -> None:
    """By their comments, before the switches that Slurm knows."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    tree = cluster.shared / "domains.conf"
    tree.write_text("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\nSwitchName=s Switches=a,b\n")
    domain = "5e797fc6-0f46-421a-8724-0e102c0f723c.1234"
    for name in ("n1", "n3"):
        slurm.set_comment(name, node_comment.write("rack 12", NodeHistory(domain=domain)))
    picked = opsd_nodes(cluster, "pick", "2", f"--topology={tree}")
    assert (picked.returncode, picked.stdout) == (exitcodes.OK, "n[1,3]\n")
    assert f"2 nodes of partition train, in NVLink domain {domain}, all below switch s" in picked.stderr


def test_pairs_of_leaf_switches_come_due(cluster: Cluster) -> None:
    """One node below each; a measurement is kept in the comments of both."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    tree = cluster.shared / "pairs.conf"
    tree.write_text("BlockName=a Nodes=n[1-2]\nBlockName=b Nodes=n3\nBlockName=c Nodes=n4\nBlockSizes=1\n")
    due = ("due", "--pairs", f"--topology={tree}")
    assert opsd_nodes(cluster, *due).stdout == "n[1,3]\nn[2,4]\n"
    leaf_paths.note(slurm, ("n1", "n3"), parse(tree.read_text()).leaf, time.time(), passed=True)
    assert opsd_nodes(cluster, *due).stdout == "n[2,4]\n"
    (pair,) = json.loads(opsd_nodes(cluster, *due, "--json", "--count=1").stdout)["pairs"]
    assert (pair["leaves"], pair["at"]) == (["a", "c"], 0.0)
    assert opsd_nodes(cluster, "due", "--pairs").stdout == ""


def test_faults_are_read_from_the_comments(cluster: Cluster) -> None:
    """With those of a file; so few of them prove nothing, and no node is called a lemon."""
    slurm, now = CommandSlurm(runner_on(cluster.controller)), time.time()
    stays = tuple(Stay("gpu_xid", now - days * 86_400, now - days * 86_400 + 60) for days in (9, 6, 3))
    slurm.set_comment("n2", node_comment.write("rack 12", NodeHistory(stays)))
    more = cluster.shared / "jobs.jsonl"
    more.write_text(json.dumps({"node": "n1", "kind": "job", "at": now - 60}) + "\n\n")
    shown = opsd_nodes(cluster, "lemons", "--json", f"--history={more}")
    told = json.loads(shown.stdout)
    assert [(one["node"], one["faults"], one["relapses"]) for one in told["nodes"]] == [("n2", 3, 2), ("n1", 1, 0)]
    assert (told["lemons"], told["lasting"]["proven"], told["lasting"]["high"]) == ([], False, None)
    said = opsd_nodes(cluster, "lemons").stdout
    assert (
        "in the 3 days that follow: faults of all nodes: 1, on 1 of these nodes; fewer than 5 are too few to tell"
        in said
    )
    assert "n2" in said
    strange = [{"node": "n1.cluster", "at": now - 60}, {"node": "n1", "at": now * 1000}]
    more.write_text("\n".join(json.dumps({"kind": "job", **fault}) for fault in strange))
    warned = opsd_nodes(cluster, "lemons", f"--history={more}")
    assert (warned.returncode, warned.stderr.splitlines()) == (
        exitcodes.OK,
        [
            "Slurm has no node n1.cluster; faults of unknown nodes do not count",
            "faults in the future do not count (1): times are epoch seconds",
        ],
    )
    slurm.set_comment("n2", "")
    more.write_text("\ufeff" + json.dumps({"node": "n1", "kind": "job", "at": now - 60}), encoding="utf-8")
    young = opsd_nodes(cluster, "lemons", f"--history={more}").stdout
    assert "  in the days that follow: the history of faults is too short to tell\n  14 days later: the hist" in young
    without = opsd_nodes(cluster, "lemons", "--jobs")
    assert (without.returncode, without.stderr) == (
        exitcodes.FAILED, "opsd: Slurm: sacct: this cluster keeps no accounting (AccountingStorageType)\n",
    )  # fmt: skip


def test_failed_jobs_are_counted_from_what_an_agent_keeps(cluster: Cluster) -> None:
    """A cluster without accounting says that they are not, and one that has it as of when they are."""
    run, now = runner_on(cluster.controller), time.time()
    slurm, clock = CommandSlurm(run), FakeClock()

    def agent(read: Callable[[float, float], list[NodeFailure]]) -> FailedJobs:
        made = FailedJobs(slurm, "n1", read=read, clock=clock.monotonic, wall=lambda: now)
        made.may_ask = True
        clock.advance(FIRST_S)
        return made

    assert "are not counted: no agent has read" in opsd_nodes(cluster, "lemons").stdout
    without = agent(lambda at, days: job_faults.read(run, at, days))
    with pytest.raises(SlurmRejected, match="keeps no accounting"):
        without.refresh()
    assert "are not counted: Slurm's accounting gave no answer" in opsd_nodes(cluster, "lemons").stdout
    slurm.set_comment("n1", "")
    agent(lambda at, days: [NodeFailure("n3", "job", now - day * 86_400) for day in (2, 4)]).refresh()
    assert "ran without it are counted as of" in opsd_nodes(cluster, "lemons").stdout
    told = json.loads(opsd_nodes(cluster, "lemons", "--json").stdout)
    assert [(one["node"], one["faults"]) for one in told["nodes"]] == [("n3", 2)]
    assert told["jobs_counted"] is True


def test_bad_input_is_told_in_one_sentence(cluster: Cluster) -> None:
    """What is wrong, where, and what it should be."""
    wrong = cluster.shared / "wrong.jsonl"
    wrong.write_text('{"node": "n1"}\n')
    for arguments, sentence in (
        (("lemons", f"--history={wrong}"), "line 1 of"),
        (("pick", "2", f"--topology={wrong}x"), "does not exist"),
        (("pick", "2", f"--topology={wrong}"), "has no nodes below a switch"),
        (("pick", "2", "--partition=none"), "Slurm has no partition none"),
        (("pick", "0"), "0 is not in the range"),
    ):
        said = opsd_nodes(cluster, *arguments)
        assert (said.returncode, sentence in said.stderr) == (exitcodes.USAGE, True), said.stderr
        assert "Traceback" not in said.stderr
    strange = cluster.shared / "strange.conf"
    strange.write_text("SwitchName=a Nodes=n1.example,n2.example\n")
    for arguments in (("pick", "2", f"--topology={strange}"), ("due", "--pairs", f"--topology={strange}")):
        said = opsd_nodes(cluster, *arguments)
        assert said.returncode == exitcodes.OK
        assert "none of these nodes is in the topology: it has n1.example for one, Slurm n1" in said.stderr


def test_hardware_that_was_replaced_begins_anew(cluster: Cluster) -> None:
    """By one command, of several nodes; other words in the comments stay, and a node that Slurm has not is named."""
    slurm, now = CommandSlurm(runner_on(cluster.controller)), time.time()
    stays = tuple(Stay("gpu_xid", now - days * 86_400, now - days * 86_400 + 60) for days in (9, 6, 3))
    slurm.set_comment("n2", node_comment.write("rack 12", NodeHistory(stays)))
    done = opsd_nodes(cluster, "replaced", "n[1-2]")
    assert (done.returncode, done.stdout.splitlines()) == (
        exitcodes.OK,
        ["n1: 0 faults until now no longer count", "n2: 3 faults until now no longer count"],
    )
    assert json.loads(opsd_nodes(cluster, "lemons", "--json").stdout)["nodes"] == []
    assert slurm.comments(["n2"])["n2"].startswith("rack 12 [opsd1 anew=")
    strange = opsd_nodes(cluster, "replaced", "n9")
    assert (strange.returncode, "Slurm has no node n9" in strange.stderr) == (exitcodes.FAILED, True)
    for name in ("n1", "n2"):
        slurm.set_comment(name, "")
