"""From a GPU's fault to a healed node on a real Slurm cluster, without anybody touching a key."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.preflight.command import HISTORY
from opsd.preflight.history import History
from opsd.repair.case_file import CaseFile
from opsd.slurm import node_comment
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.hostlist import compress
from tests.integration.slurm.cluster import FAST, Cluster, missing, runner_on, wait_until
from tests.integration.slurm.machine_room import MachineRoom
from tests.integration.slurm.training import Training, make_data

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(500)]

NODES = ("n1", "n2", "n3", "n4", "n5")


@pytest.fixture
def room(tmp_path: Path, library: str) -> Iterator[tuple[Cluster, MachineRoom]]:
    """A cluster of its own whose nodes can be reset and rebooted."""
    yield from _room(tmp_path, library, "")


def _room(tmp_path: Path, library: str, pairs: str, attempts: int = 3) -> Iterator[tuple[Cluster, MachineRoom]]:
    if reason := missing():
        pytest.skip(reason)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    settings = {**FAST, "RebootProgram": str(MachineRoom.reboot_program(tmp_path)), "ResumeTimeout": "60"}
    with (
        Cluster(NODES, settings) as cluster,
        MachineRoom(cluster, tmp_path, Path(library), NODES, pairs=pairs, attempts=attempts) as machines,
    ):
        yield cluster, machines


@pytest.fixture
def paired(tmp_path: Path, library: str) -> Iterator[tuple[Cluster, MachineRoom]]:
    """The same of nodes with InfiniBand, which measure the network with partners."""
    yield from _room(tmp_path, library, "dev")


@pytest.fixture
def paired_once(tmp_path: Path, library: str) -> Iterator[tuple[Cluster, MachineRoom]]:
    """The same, with one remedy for each node."""
    yield from _room(tmp_path, library, "dev", attempts=1)


def ended(machines: MachineRoom, name: str, timeout: float = 240.0) -> str:
    """How the repair of a node has ended, once it has."""
    cases = CaseFile(machines.state(name))
    try:
        wait_until(cases.past, "the repair has ended", timeout)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{machines.log(name)}") from error
    return str(cases.past()[-1].end)


def test_a_faulty_node_comes_back_as_a_spare(room: tuple[Cluster, MachineRoom]) -> None:
    """A GPU fails under a run of four nodes: the spare takes its node's place, the job gives the node back, a reset
    does not help, a reboot does; it is tested, returned, and ready as a spare, while the run goes on.
    """
    cluster, machines = room
    slurm = CommandSlurm(runner_on(cluster.controller))
    training = Training(cluster, make_data(cluster.shared, 400_000), "healed", 4, 1, 100_000)
    job = training.submit()
    training.until_steady()
    batch_host = slurm.jobs([job])[0].batch_host
    victim = next(name for name in training.places if name != batch_host)
    machines.fail(victim, cured_by="reboot")
    try:
        training.until(lambda: victim not in training.places, "the spare in its place")
        assert ended(machines, victim) == "returned", machines.log(victim)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{machines.log(victim)}") from error
    (case,) = CaseFile(machines.state(victim)).past()
    assert [(a.what, a.ok) for a in case.attempts] == [
        ("reset_gpus", True), ("retest", False), ("reboot", True), ("retest", True), ("return", True),
    ]  # fmt: skip
    steps = "reset_gpus done  retest failed  reboot done  retest done  return done  returned: "
    wait_until(lambda: steps in machines.history(victim), "the agent's history has the ladder", 60.0)
    assert "GPU 0" in machines.history(victim), "and the incident before it"
    assert machines.reboots == [victim]
    assert machines.commands(victim) == ["nvidia-smi --gpu-reset"]
    wait_until(lambda: slurm.nodes([victim])[0].usable, "a ping has shown that it responds")
    told = node_comment.read(slurm.comments()[victim])
    assert (told.spare, [stay.back is not None for stay in told.stays]) == ("ready", [True])
    (still,) = slurm.jobs([job])
    assert (still.state, victim in still.nodes) == ("running", False)
    step = training.step
    training.until(lambda: training.step > step + 5, "the run goes on")


def test_a_node_that_nothing_cures_is_kept_out_with_its_evidence(room: tuple[Cluster, MachineRoom]) -> None:
    """Three attempts fail; the reason in Slurm names an archive with incidents, attempts and the driver's state."""
    cluster, machines = room
    slurm = CommandSlurm(runner_on(cluster.controller))
    slurm.update_nodes(["n2"], "drain", "opsd:gpu_xid-1 gpu_xid: GPU 0: Xid 95")
    machines.fail("n2", cured_by="nothing")
    CaseFile(machines.state("n2")).order()
    assert ended(machines, "n2") == "rma", machines.log("n2")
    (case,) = CaseFile(machines.state("n2")).past()
    assert [attempt.what for attempt in case.remedies] == ["reset_gpus", "reboot", "reboot"]
    (node,) = slurm.nodes(["n2"])
    assert node.out_of_service
    assert node.reason.startswith("opsd:rma gpu_xid: 3 attempts without success")
    assert node.reason.endswith(f"see {case.bundle}")
    with tarfile.open(case.bundle) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"index.json", "repairs.json", "incidents.json", "nvml.json", "preflights.json", "slurm-node.txt"} <= names
    assert [node.name for node in slurm.nodes() if node.usable] == ["n1", "n3", "n4", "n5"]


def test_a_node_whose_network_card_failed_measures_it_with_a_partner(paired: tuple[Cluster, MachineRoom]) -> None:
    """It is drained, and so a job of the repair runs the other half on an idle node; its record says on which."""
    cluster, machines = paired
    slurm = CommandSlurm(runner_on(cluster.controller))
    slurm.update_nodes(["n2"], "drain", "opsd:nic_failed-1 nic_failed: mlx5_0 port 1")
    CaseFile(machines.state("n2")).order()
    assert ended(machines, "n2") == "returned", machines.log("n2")
    (case,) = CaseFile(machines.state("n2")).past()
    assert [(a.what, a.ok) for a in case.attempts] == [("reboot", True), ("retest", True), ("return", True)]
    told = re.match("passed infiniband and preflight quick, and the network with (n[1345])", case.attempts[1].detail)
    assert told, case.attempts
    history = History(machines.state("n2") / HISTORY)
    report = history.report(max(run.id for run in history.runs("network of 2 nodes")))
    facts = {name: value for result in report.results for name, value in result.facts.items()}
    assert (report.passed, facts["nodes"]) == (True, compress(["n2", told[1]]))
    wait_until(lambda: not slurm.jobs(), "the partner is free again")


def test_a_node_whose_network_is_bad_with_two_partners_is_kept_out(paired_once: tuple[Cluster, MachineRoom]) -> None:
    """It meets both, and with neither a collective ends: that is its own fault, and both are in service again."""
    cluster, machines = paired_once
    slurm = CommandSlurm(runner_on(cluster.controller))
    slurm.update_nodes(["n2"], "drain", "opsd:nic_failed-1 nic_failed: mlx5_0 port 1")
    machines.cut_off("n2")
    CaseFile(machines.state("n2")).order()
    assert ended(machines, "n2", 400.0) == "rma", machines.log("n2")
    (case,) = CaseFile(machines.state("n2")).past()
    assert [(a.what, a.ok) for a in case.attempts] == [("reboot", True), ("retest", False)]
    why = "network_collectives failed: Collectives over all nodes: all_reduce of 1.02 kB failed"
    told = re.match(f"the network is bad with (n[1345]): {why}.*; (n[1345]): {why}", case.attempts[1].detail)
    assert told, case.attempts
    assert told[1] != told[2]
    assert slurm.nodes(["n2"])[0].reason.startswith(
        "opsd:rma nic_failed: 1 attempts without success; the last: the network"
    )
    wait_until(lambda: not slurm.jobs(), "the partners are free again")
