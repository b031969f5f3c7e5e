"""From a job that a bad node refuses to the same job on the healed node: nobody looks at it but Slurm's prolog."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.collectors.lib.processes import MAJOR
from opsd.repair.case_file import CaseFile
from opsd.repair.repair_plan import Case
from opsd.slurm import node_comment
from opsd.slurm.commands import CommandSlurm
from tests.fakes.tree import ROOT
from tests.integration.slurm.cluster import FAST, Cluster, missing, runner_on, wait_until
from tests.integration.slurm.machine_room import MachineRoom

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(500)]

SETTINGS = {
    **FAST,
    "PrologFlags": "Alloc",
    "BatchStartTimeout": "180",
    "SchedulerParameters": f"{FAST['SchedulerParameters']},nohold_on_prolog_fail",
}


HOLDS = "import os, sys, time; os.open(sys.argv[1], os.O_PATH); open(sys.argv[2], 'w').close(); time.sleep(600)"
NAMES = ("n1", "n2")


@pytest.fixture
def rooms(tmp_path: Path, library: str) -> Iterator[tuple[Cluster, MachineRoom]]:
    """Two nodes with the prolog that is shipped, which are repaired and have no agents."""
    if reason := missing():
        pytest.skip(reason)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    prolog = tmp_path / "prolog"
    prolog.write_text(
        f"#!/bin/sh\nexport OPSD={tmp_path}/$SLURMD_NODENAME/opsd OPSD_CONFIG={tmp_path}/$SLURMD_NODENAME/opsd.toml\n"
        f"exec {ROOT / 'deploy/slurm/prolog.sh'}\n"
    )
    prolog.chmod(0o755)
    with (
        Cluster(NAMES, {**SETTINGS, "Prolog": str(prolog)}) as cluster,
        MachineRoom(cluster, tmp_path, Path(library), NAMES, agents=False) as machines,
    ):
        yield cluster, machines


def refused_and_repaired(cluster: Cluster, machines: MachineRoom) -> Case:
    """The repair of n1 after it has refused a job that wants that node, and which has run there since."""
    slurm, cases = CommandSlurm(runner_on(cluster.controller)), CaseFile(machines.state("n1"))
    ran = cluster.shared / "ran"
    cluster.controller.run("sbatch", "--nodelist=n1", f"--wrap=hostname >{ran}", "--output=/dev/null")
    try:
        wait_until(cases.past, "the repair has ended", 240)
        wait_until(lambda: ran.exists() and ran.read_text() == "n1\n", "the job has run")
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {slurm.nodes(['n1'])}\n{machines.log('n1')}") from error
    (case,) = cases.past()
    (stay,) = node_comment.read(slurm.comments()["n1"]).stays
    assert (stay.kind, stay.back is not None, cases.ordered) == ("preflight", True, False)
    assert all(node.usable for node in slurm.nodes())
    return case


def test_a_job_that_a_bad_node_refuses_starts_there_once_it_is_repaired(rooms: tuple[Cluster, MachineRoom]) -> None:
    """The shipped prolog finds a GPU that asks for a reset, Slurm drains the node, the order makes that opsd's, the
    reset helps, the node is tested and returned, and the job, which wants that node, runs.
    """
    cluster, machines = rooms
    machines.fail("n1", cured_by="reset")
    case = refused_and_repaired(cluster, machines)
    assert (case.end, [attempt.what for attempt in case.attempts]) == ("returned", ["reset_gpus", "retest", "return"])
    assert case.reason == "opsd:prolog preflight: quick failed: gpu_health; Slurm's prolog refused a job"
    assert machines.commands("n1") == ["nvidia-smi --gpu-reset"]


def test_a_process_that_a_job_has_left_is_ended_before_the_next_one(
    rooms: tuple[Cluster, MachineRoom], tmp_path: Path
) -> None:
    """It has a GPU open, under a name of its own; no GPU is reset for it."""
    cluster, machines = rooms
    mine, opened = tmp_path / "mine", tmp_path / "opened"
    os.mknod(mine, 0o20666, os.makedev(MAJOR, 0))
    with cluster.nodes["n1"].process(sys.executable, "-c", HOLDS, str(mine), str(opened)) as holder:
        wait_until(opened.exists, "it has the GPU open")
        case = refused_and_repaired(cluster, machines)
        assert holder.wait(30) != 0
    ending, *after = case.attempts
    assert (case.end, ending.what, ending.detail) == ("returned", "end_processes", "ended 1 process")
    assert [attempt.what for attempt in after] == ["retest", "return"]
    assert case.reason == "opsd:prolog preflight: quick failed: leftovers; Slurm's prolog refused a job"
    assert machines.commands("n1") == []
