"""Which of opsd's promises a job can keep, by its batch script and by what Slurm tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.commands.checkout import ROOT
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import JobDetails
from opsd.slurm.promises import Asked, broken, facts, of_job, of_script, sbatch_options
from tests.fakes.slurm import RELEASES, SEPARATOR, RecordedRunner

WHOLE = "#SBATCH --no-kill --requeue --open-mode=append --signal=USR1@300"
NO_KILL, NO_REQUEUE, SCRIPT_ALONE = "#SBATCH --no-kill", "#SBATCH --requeue", "leave out B:"


@pytest.mark.parametrize(
    ("lines", "remedies"),
    [
        (WHOLE, []),
        ("#SBATCH -k --requeue", []),
        ("#SBATCH --requeue", [NO_KILL]),
        ("#SBATCH --no-kill=off --requeue", [NO_KILL]),
        ("#SBATCH --no-kill --no-requeue", [NO_REQUEUE]),
        ("#SBATCH --no-requeue\n\n#SBATCH -k --requeue # as the second", []),
        ("#SBATCH --no-kill --signal=B:USR1@60", [SCRIPT_ALONE]),
        ("#SBATCH --no-kill --signal RB:TERM@60", [SCRIPT_ALONE]),
        ("##SBATCH --no-kill", [NO_KILL]),
        ("export A=1\n#SBATCH --no-kill", [NO_KILL]),
        ("#SBATCH --no-kill --comment='it is", []),
    ],
)
def test_a_script_is_read_as_sbatch_reads_it(lines: str, remedies: list[str]) -> None:
    """Short options, later lines, comments, and what comes after the first command."""
    said = list(broken(of_script(f"#!/bin/bash\n{lines}\nexec opsd slurm run -- train.py\n")))
    assert [next(word for word in (NO_KILL, NO_REQUEUE, SCRIPT_ALONE) if word in text) for text in said] == remedies


def test_options_are_read_as_sbatch_reads_them() -> None:
    """Several on a line, with an equals sign, a blank or no value; other lines are none."""
    lines = ("#!/bin/sh", "#SBATCH --nodes=4 --requeue", "#SBATCH -t 2-00:00:00 -k", "#SBATCH --signal=B:USR1@300")
    script = "\n".join((*lines, "#SBATCH -J train -N5", "echo --nodes=9"))
    assert sbatch_options(script) == {
        "--nodes": "5", "--requeue": "", "--time": "2-00:00:00", "--no-kill": "", "--signal": "B:USR1@300",
    }  # fmt: skip


@pytest.mark.parametrize("template", sorted((ROOT / "deploy/slurm").glob("train-*.sbatch")), ids=lambda path: path.name)
def test_the_templates_keep_all(template: Path) -> None:
    """Each fact about them is good."""
    assert {fact.ok for fact in facts(of_script(template.read_text()))} == {True}


def test_a_range_of_nodes_with_tasks_per_node_has_no_spares() -> None:
    """Slurm 22.05 takes the lower number."""
    said = facts(of_script(f"{WHOLE}\n#SBATCH -N 4-5 --ntasks-per-node=8\n"))
    assert [fact.text for fact in said if fact.ok is False] == [
        "with --ntasks-per-node Slurm gives a range of nodes its lower number: no spares (22.05)"
    ]


def test_what_slurm_tells_of_a_running_job_counts() -> None:
    """More than its script, which the command line of sbatch may have overruled."""
    refused = JobDetails({}, requeues=False)
    (said,) = broken(of_job(refused, WHOLE), 7)
    assert "scontrol update JobId=7 Requeue=1" in said
    (said,) = broken(of_job(JobDetails({}, requeues=True), "#!/bin/sh\n"))
    assert "unless --no-kill was on the command line of sbatch" in said
    line = JobDetails({}, requeues=True, submitted="sbatch -N 2 train.sbatch")
    (said,) = broken(of_job(line, "#!/bin/sh\n"))
    assert "unless" not in said
    told = JobDetails({}, requeues=True, submitted="sbatch --no-kill train.sbatch")
    assert list(broken(of_job(told, "#!/bin/sh\n"))) == []
    assert list(broken(of_job(JobDetails({}), "", {"SBATCH_NO_KILL": ""}))) == []
    assert list(broken(of_job(JobDetails({}, requeues=True), None))) == []


def test_a_job_of_salloc_has_no_script() -> None:
    """It cannot be requeued, and has --no-kill of its own."""
    said = list(broken(of_job(JobDetails({}, requeues=True, batch=False), None)))
    assert len(said) == 2 and "salloc" in said[0] and "use salloc --no-kill" in said[1]


@pytest.mark.parametrize("asked", [of_script("#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N2\n"), Asked(heterogeneous=True)])
def test_a_heterogeneous_job_keeps_nothing(asked: Asked) -> None:
    """One sentence that says so."""
    (fact,) = facts(asked)
    assert fact.ok is False and "heterogeneous" in fact.text


@pytest.mark.parametrize("version", RELEASES)
def test_what_each_release_tells(version: str) -> None:
    """From a name of two lines on: whether the job is requeued, its script, and the command line in newer ones."""
    found = CommandSlurm(RecordedRunner(version), separator=lambda: SEPARATOR).details(1)
    assert (found.requeues, found.batch, found.heterogeneous, found.command) == (True, True, False, "")
    assert found.submitted.startswith("sbatch --parsable") is (version >= "25")


def test_the_command_reads_a_batch_script(tmp_path: Path) -> None:
    """Without Slurm on this machine. A broken promise is exit code 1, a file that is not there 2."""
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --no-requeue\ntrue\n")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "opsd", "slurm", "check", *options]
        return subprocess.run(argv, capture_output=True, text=True, env={"PATH": ""}, cwd=tmp_path, check=False)

    bad, missing = run("--sbatch=job.sbatch"), run("--sbatch=nothing")
    assert bad.returncode == exitcodes.FAILED
    assert [line[:3] for line in bad.stdout.splitlines()].count("no ") == 2
    good = run("--json", f"--sbatch={ROOT / 'deploy/slurm/train-pool.sbatch'}")
    assert (good.returncode, json.loads(good.stdout)["usable"]) == (exitcodes.OK, True)
    assert (missing.returncode, run("--job=7", "--sbatch=job.sbatch").returncode) == (exitcodes.USAGE,) * 2
