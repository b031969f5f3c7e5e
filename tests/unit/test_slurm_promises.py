"""Which of opsd's promises a job can keep, by its batch script and by what Slurm tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.slurm.check import Asked, broken, facts, of_job, of_script
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import JobDetails
from opsd.slurm.sbatch_script import read_script
from tests.fakes.slurm import RELEASES, SEPARATOR, RecordedRunner
from tests.fakes.tree import ROOT

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
    ],
)
def test_a_script_is_read_as_sbatch_reads_it(lines: str, remedies: list[str]) -> None:
    """Short options, later lines, comments, and what comes after the first command."""
    said = list(broken(of_script(f"#!/bin/bash\n{lines}\nexec opsd slurm run -- train.py\n")))
    assert [next(word for word in (NO_KILL, NO_REQUEUE, SCRIPT_ALONE) if word in text) for text in said] == remedies


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ("#SBATCH --nodes=4 --requeue\n#SBATCH -J train -N5", {"nodes": "5", "requeue": "", "job-name": "train"}),
        ("#SBATCH -t 2-00:00:00 -k\necho --nodes=9", {"time": "2-00:00:00", "no-kill": ""}),
        ("#SBATCH --no-k --requ --sig=USR1@300", {"no-kill": "", "requeue": "", "signal": "USR1@300"}),
        ("#SBATCH --comment --no-kill -J -k", {"comment": "--no-kill", "job-name": "-k"}),
        ("#SBATCH -Hk -sN3", {"hold": "", "no-kill": "", "oversubscribe": "", "nodes": "3"}),
        ("#SLURM --no-kill # as #SBATCH", {"no-kill": ""}),
        ("#SBATCH --comment=a#b\\ c", {"comment": "a"}),
        ('#SBATCH --comment="a # b" --wrap=\'c d\'', {"comment": "a # b", "wrap": "c d"}),
        ("# notes\u2028#SBATCH --no-kill\n#SBATCH -N1", {"nodes": "1"}),
        ("# a\rset -e\n#SBATCH -k", {"no-kill": ""}),
        ("\u00a0\n#SBATCH -k", {}),
        ("#SBATCH --container-image docker://x --container-mounts=/a -k",
         {"container-image": "docker://x", "container-mounts": "/a", "no-kill": ""}),
    ],
)  # fmt: skip
def test_options_are_read_as_getopt_reads_them(lines: str, options: dict[str, str]) -> None:
    """Shortened names, joined letters, values that look like options, comments; other lines are none."""
    found = read_script(f"#!/bin/sh\n{lines}\ntrue\n")
    assert (found.options, found.refused) == (options, "")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("", "it is empty"),
        ("\n#!/bin/sh\n", "first line"),
        ("\ufeff#!/bin/sh\n", "first line"),
        ("#!/bin/sh\r\ntrue\r\n", "those of DOS"),
        ("#!/bin/sh\ntr\0ue\n", "NUL"),
        ("#!/bin/sh\n#" + (4 << 20) * "x", "more than 4 MB"),
        ("#!/bin/sh\n#SBATCH -J it's\n", "quotation mark"),
        ("#!/bin/sh\n#SBATCH foo -k\n", "foo is no option"),
        ("#!/bin/sh\n#SBATCH -- --no-kill\n", "--no-kill is no option"),
        ("#!/bin/sh\n#SBATCH --requeue=yes\n", "--requeue takes no value"),
        ("#!/bin/sh\n#SBATCH --no-kill=yes\n", "neither --no-kill nor"),
        ("#!/bin/sh\n#SBATCH -kN2\n", "neither --no-kill nor"),
        ("#!/bin/sh\n#SBATCH --signal\n", "--signal lacks its value"),
        ("#!/bin/sh\n#SBATCH --no\n", "--no may be"),
    ],
)
def test_a_script_that_sbatch_refuses_keeps_no_promise(script: str, why: str) -> None:
    """The one sentence says why; a preflight of the run says the same."""
    (fact,) = facts(of_script(script))
    assert fact.ok is False
    assert why in fact.text


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("--signal=USR1@300", ""),
        ("--signal=10", ""),
        ("--signal=r:sigterm@120", ""),
        ("--signal=B:USR1@120 --signal=R:USR1@120", "leave out B:"),
        ("--signal=KILL@100", "not saved"),
        ("--signal=USR2@100", "not saved"),
        ("--signal=USR1@0", "never sent"),
        ("--signal=CHLD@60", "none that sbatch takes"),
        ("--signal=0@60", "none that sbatch takes"),
        ("--signal=USR1@70000", "none that sbatch takes"),
        ("-t 00:03:00 --signal=USR1@300", "comes at the start"),
    ],
)
def test_a_signal_counts_only_if_the_run_can_be_saved_at_it(line: str, remedy: str) -> None:
    """The flags of several add up, and the notice has to be shorter than the time limit."""
    said = facts(of_script(f"#!/bin/sh\n#SBATCH -k --requeue --open-mode=appendix {line}\n"))
    assert [fact.text for fact in said if fact.ok is False and remedy not in fact.text] == []
    assert any("told to save before" in fact.text for fact in said) is (remedy == "")
    assert all(fact.ok for fact in said) is (remedy == "")


def test_variables_of_the_user_count_more_than_the_script() -> None:
    """As for sbatch."""
    environ = {"SBATCH_NO_REQUEUE": "1", "SBATCH_SIGNAL": "B:USR1@10"}
    said = list(broken(of_script(f"#!/bin/sh\n{WHOLE}\n", environ)))
    assert len(said) == 2
    assert "--no-requeue" in said[0]
    assert "leave out B:" in said[1]


def test_a_long_line_is_read_at_once() -> None:
    """It used to take a time that grew with the square of its length."""
    found = read_script(f"#!/bin/sh\n#SBATCH -k --comment={3_000_000 * 'a'}\n")
    assert len(found.options["comment"]) == 3_000_000


@pytest.mark.parametrize("template", sorted((ROOT / "deploy/slurm").glob("train-*.sbatch")), ids=lambda path: path.name)
def test_the_templates_keep_all(template: Path) -> None:
    """Each fact about them is good."""
    assert {fact.ok for fact in facts(of_script(template.read_text()))} == {True}


def test_a_range_of_nodes_with_tasks_per_node_has_no_spares() -> None:
    """Slurm 22.05 takes the lower number."""
    said = facts(of_script(f"#!/bin/sh\n{WHOLE}\n#SBATCH -N 4-5 --ntasks-per-node=8\n"))
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


@pytest.mark.parametrize(
    "asked", [of_script("#!/bin/sh\n#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N2\n"), Asked(heterogeneous=True)]
)
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
    os.mkfifo(tmp_path / "pipe")
    silent = run("--sbatch=pipe")
    assert (silent.returncode, "nobody writes" in silent.stderr) == (exitcodes.USAGE, True)
    assert (missing.returncode, run("--job=7", "--sbatch=job.sbatch").returncode) == (exitcodes.USAGE,) * 2
