"""From a job that a bad node refuses to the same job on the healed node: nobody looks at it but Slurm's prolog."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.commands.checkout import ROOT
from opsd.repair.case_file import CaseFile
from opsd.slurm import node_comment
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import FAST, Cluster, missing, runner_on, wait_until
from tests.integration.slurm.machine_room import MachineRoom

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(500)]

SETTINGS = {
    **FAST,
    "PrologFlags": "Alloc",
    "BatchStartTimeout": "180",
    "SchedulerParameters": f"{FAST['SchedulerParameters']},nohold_on_prolog_fail",
}


def test_a_job_that_a_bad_node_refuses_starts_there_once_it_is_repaired(tmp_path: Path, library: str) -> None:
    """The shipped prolog finds a GPU that asks for a reset, Slurm drains the node, the order makes that opsd's, the
    reset helps, the node is tested and returned, and the job, which wants that node, runs.
    """
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
    names = ("n1", "n2")
    with (
        Cluster(names, {**SETTINGS, "Prolog": str(prolog)}) as cluster,
        MachineRoom(cluster, tmp_path, Path(library), names, agents=False) as machines,
    ):
        slurm, cases = CommandSlurm(runner_on(cluster.controller)), CaseFile(machines.state("n1"))
        machines.fail("n1", cured_by="reset")
        ran = cluster.shared / "ran"
        cluster.controller.run("sbatch", "--nodelist=n1", f"--wrap=hostname >{ran}", "--output=/dev/null")
        try:
            wait_until(cases.past, "the repair has ended", 240)
            wait_until(lambda: ran.exists() and ran.read_text() == "n1\n", "the job has run", 120)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {slurm.nodes(['n1'])}\n{machines.log('n1')}") from error
        (case,) = cases.past()
        assert (case.end, [attempt.what for attempt in case.attempts]) == (
            "returned", ["reset_gpus", "retest", "return"],
        )  # fmt: skip
        assert case.reason.startswith("opsd:prolog preflight: ")
        assert machines.commands("n1") == ["nvidia-smi --gpu-reset"]
        (stay,) = node_comment.read(slurm.comments()["n1"]).stays
        assert (stay.kind, stay.back is not None, cases.ordered) == ("preflight", True, False)
        assert all(node.usable for node in slurm.nodes())
