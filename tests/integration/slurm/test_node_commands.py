"""`opsd drain` and `opsd undrain` on a real Slurm cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.preflight.checks import CHECKS
from opsd.repair.attend import SLURMS_REASON
from opsd.repair.case_file import CaseFile
from opsd.settings.policy import PolicySettings
from opsd.slurm import node_comment
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.deferred import DeferredUpdates
from tests.integration.slurm.cluster import FAST, KEEPS_REASON, Cluster, missing, runner_on, wait_until

pytestmark = pytest.mark.xdist_group("slurm")


def opsd(cluster: Cluster, node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command on ``node``; its state folder is in the shared one."""
    settings = [f"--set=agent.node={node}", f"--set=agent.state_dir={cluster.shared / f'state-{node}'}"]
    path = f"PYTHONPATH={':'.join(sys.path)}"
    command = ("env", path, sys.executable, "-m", "opsd", *arguments, *settings)
    return cluster.nodes[node].run(*command, check=False, timeout=120)


def test_a_node_goes_out_and_comes_back_proved(cluster: Cluster) -> None:
    """Out with reason and evidence; back only after a preflight that is newer; its comment remembers both."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    slurm.set_comment("n1", "rack 12")
    assert opsd(cluster, "n1", "drain", "n1", "--kind=ib_link", "--reason=clean the cable").returncode == exitcodes.OK
    (node,) = slurm.nodes(["n1"])
    assert node.reason.startswith("opsd:manual ib_link: clean the cable; see ")
    assert Path(node.reason.rpartition(" ")[2]).exists()
    refused = opsd(cluster, "n1", "return", "n1", "--set=policy.return_profile=quick")
    assert (refused.returncode, "has no result of preflight quick" in refused.stderr) == (exitcodes.FAILED, True)
    others = [check.name for check in CHECKS if check.name != "numa"]
    whole = f"--set=preflight.skip={others}"
    assert opsd(cluster, "n1", "preflight", whole).returncode == exitcodes.OK
    back = opsd(cluster, "n1", "return", "n1", "--set=policy.return_profile=quick", whole)
    assert (back.returncode, back.stdout) == (exitcodes.OK, "gave back n1\n")
    wait_until(lambda: slurm.nodes(["n1"])[0].usable, "the node is in service")
    assert not slurm.nodes(["n1"])[0].reason or slurm.version >= KEEPS_REASON
    comment = slurm.comments()["n1"]
    (stay,) = node_comment.read(comment).stays
    assert (comment.startswith("rack 12 [opsd1 ib_link="), stay.back is not None) == (True, True)
    again = opsd(cluster, "n1", "drain", "n1", "--reason=again")
    assert (again.returncode, "policy.drain_cooldown_s" in again.stderr) == (exitcodes.FAILED, True)
    assert slurm.comments(["n1", "n2"]) == {"n1": comment, "n2": ""}


def test_a_repair_is_shown_before_it_is_done(cluster: Cluster) -> None:
    """What a drained node would begin with; one that a person holds, or for which there is no remedy, is left alone."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    for reason, said in (
        ("opsd:gpu_xid-1 gpu_xid: Xid 95", "would begin with reset_gpus, for opsd:gpu_xid-1 gpu_xid: Xid 95"),
        ("opsd:manual ib_link: cable", "no remedy fits ib_link"),
        ("replace the fan", "by root: replace the fan; opsd leaves it alone"),
    ):
        slurm.update_nodes(["n4"], "drain", reason)
        shown = opsd(cluster, "n4", "repair", "--set=nvml.enabled=false")
        assert said in shown.stdout + shown.stderr
        assert slurm.nodes(["n4"])[0].reason == reason
    slurm.update_nodes(["n4"], "resume")
    wait_until(lambda: slurm.nodes(["n4"])[0].usable, "the node is in service")


@pytest.mark.long
def test_a_node_that_refused_a_job_becomes_opsds_to_repair(tmp_path: Path) -> None:
    """Slurm drains it for the prolog; an order of opsd's prolog takes that over, one of anything else does not."""
    if reason := missing():
        pytest.skip(reason)
    prolog = tmp_path / "prolog"
    prolog.write_text("#!/bin/sh\nexit 1\n")
    prolog.chmod(0o755)
    tmp_path.chmod(0o755)
    with Cluster(["n1", "n2"], {**FAST, "Prolog": str(prolog), "PrologFlags": "Alloc"}) as cluster:
        slurm = CommandSlurm(runner_on(cluster.controller))
        cases = CaseFile(cluster.shared / "state-n1")
        cluster.controller.run("sbatch", "--nodelist=n1", "--wrap=true", "--output=/dev/null")
        wait_until(lambda: slurm.nodes(["n1"])[0].reason == SLURMS_REASON, "the node is drained")
        settings = ("--set=policy.repair=act", "--set=repair.remedies=['end_processes']", "--set=nvml.enabled=false")
        cases.order()
        left = opsd(cluster, "n1", "repair", "--ordered", *settings)
        assert "Prolog error; opsd leaves it alone" in left.stderr
        cases.order("quick failed: gpu_burn")
        taken = opsd(cluster, "n1", "repair", "--ordered", *settings)
        assert "no remedy that is allowed fits" in taken.stdout
        assert slurm.nodes(["n1"])[0].reason.startswith("opsd:prolog preflight: ")
        (stay,) = node_comment.read(slurm.comments()["n1"]).stays
        assert (stay.kind, stay.back, cases.ordered) == ("preflight", None, False)


def test_a_controller_that_is_away_is_told_later() -> None:
    """The order waits on the node, is carried out once slurmctld is back, and only once."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1", "n2"]) as cluster:
        _tell_later(cluster)


def _tell_later(cluster: Cluster) -> None:
    slurm = CommandSlurm(runner_on(cluster.controller), deadline_s=2.0)
    updates, done = DeferredUpdates(cluster.shared / "state-n2"), list[str]()
    updates.enable()
    cluster.stop_controller()
    try:
        said = opsd(cluster, "n2", "drain", "n2", "--reason=loose fan")
    finally:
        cluster.start_controller()
    assert (said.returncode, "when Slurm answers again" in said.stderr) == (exitcodes.FAILED, True)
    wait_until(slurm.responds, "the controller is back")
    wait_until(
        lambda: done.extend(updates.apply(slurm, PolicySettings(max_drained_share=1.0), time.time())) or done, "told"
    )
    assert done == ["drained n2"]
    assert slurm.nodes(["n2"])[0].reason.startswith("opsd:manual maintenance: loose fan")
    assert updates.pending() == []
