"""Slurm's prolog and epilog: a node is drained for the word of a finished check, and for nothing else."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from opsd.preflight.checks import CHECKS

SLURM = Path(__file__).parents[2] / "deploy/slurm"
REPORT = "opsd-prolog-opsd-test.json"
FAILED = f"this node failed its preflight, job opsd-test does not start; see REPORTS/{REPORT}"
UNCHECKED = "job opsd-test starts unchecked: the preflight ended with "
VERDICT = 'for verdict; do :; done; echo "{}" >"$6"; '
"""Lines of an ``opsd`` that writes its report, and has the file for the verdict, the last of its arguments."""


def program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """What a ``logger`` in ``tmp_path`` was told."""
    program(tmp_path / "logger", f'echo "$*" >>{tmp_path}/log')
    return tmp_path / "log"


def run(name: str, folder: Path, *lines: str, limit_s: int = 20) -> int:
    """The exit code of prolog or epilog with an ``opsd`` of these lines."""
    program(folder / "opsd", 'echo "opsd: torch is missing" >&2', *lines)
    environment = {
        "OPSD": str(folder / "opsd"),
        "REPORTS": str(folder),
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "opsd-test",
        "LIMIT_S": str(limit_s),
    }
    return subprocess.run([str(SLURM / name)], env=environment, capture_output=True, timeout=120).returncode


def word(folder: Path) -> str:
    """The prolog's word for the agent."""
    said, _, at = (folder / "opsd-prolog").read_text().partition(" ")
    assert abs(time.time() - float(at)) < 60
    return said


@pytest.mark.parametrize(
    ("lines", "verdict", "said"),
    [
        ('echo fit >"$verdict"', "fit", ""),
        ('echo unfit >"$verdict"; exit 1', "unfit", FAILED),
        ('echo unknown >"$verdict"; exit 1', "unknown", UNCHECKED),
        ("exit 1", "unknown", UNCHECKED + "exit code 1, the verdict none: opsd: torch"),
        ('echo unf >"$verdict"; exit 1', "unknown", UNCHECKED),
        ('echo "unfit unfit unfit unfit" >"$verdict"; exit 1', "unknown", UNCHECKED),
        ("exit 0", "unknown", UNCHECKED + "exit code 0"),
        ("exit 2", "unknown", UNCHECKED + "exit code 2"),
        ("kill -9 $$", "unknown", UNCHECKED + "exit code 137"),
    ],
)  # fmt: skip
def test_only_the_word_of_a_finished_check_refuses_a_job(
    tmp_path: Path, logged: Path, lines: str, verdict: str, said: str
) -> None:
    """Exit codes and reports tell nothing: a broken installation has them as well, on every node of the cluster."""
    refused = run("prolog.sh", tmp_path, VERDICT + lines)
    assert (refused, word(tmp_path)) == (int(verdict == "unfit"), verdict)
    assert (tmp_path / REPORT).exists() == (verdict == "unfit")
    assert not [*tmp_path.glob("opsd-prolog.*")]
    assert (logged.read_text() if logged.exists() else "").startswith(
        f"-t opsd {said}".replace("REPORTS", str(tmp_path)) if said else ""
    )


def test_a_verdict_of_an_earlier_start_counts_for_nothing(tmp_path: Path, logged: Path) -> None:
    """Neither the word for the agent nor a report is read."""
    (tmp_path / REPORT).write_text("{}")
    (tmp_path / "opsd-prolog").write_text("unfit 1\n")
    assert run("prolog.sh", tmp_path, "exit 1") == 0
    assert (word(tmp_path), (tmp_path / REPORT).exists()) == ("unknown", False)
    assert "starts unchecked" in logged.read_text()


def test_a_prolog_takes_the_seconds_that_it_says(tmp_path: Path, logged: Path) -> None:
    """Though the check ignores signals, and something that it has started holds on to its output."""
    began = time.monotonic()
    stubborn = "trap '' TERM; setsid sleep 90 & sleep 90"
    assert run("prolog.sh", tmp_path, stubborn, limit_s=1) == 0
    assert time.monotonic() - began < 60
    assert (word(tmp_path), "the preflight took longer than 1 s" in logged.read_text()) == ("unknown", True)


def test_a_prolog_waits_for_no_log(tmp_path: Path) -> None:
    """A logger that hangs, and is not ended by being asked, costs seconds of the time that there is to end."""
    program(tmp_path / "logger", "trap '' TERM; sleep 90")
    began = time.monotonic()
    assert run("prolog.sh", tmp_path, "exit 1") == 0
    assert time.monotonic() - began < 60
    assert word(tmp_path) == "unknown"


def test_a_folder_that_cannot_be_written_refuses_no_job(tmp_path: Path, logged: Path) -> None:
    """No verdict can be had, so none is given."""
    program(tmp_path / "mktemp", "exit 1")
    assert run("prolog.sh", tmp_path, "exit 1") == 0
    assert "starts unchecked" in logged.read_text()


@pytest.mark.parametrize(("lines", "told"), [('echo unfit >"$verdict"; exit 1', True), ("exit 1", False)])
def test_an_epilog_tells_of_what_was_found(tmp_path: Path, logged: Path, lines: str, told: bool) -> None:
    """A broken installation has found nothing; either way the epilog succeeds."""
    assert run("epilog.sh", tmp_path, "for verdict; do :; done; " + lines) == 0
    assert logged.exists() == told
    assert not [*tmp_path.glob("opsd-epilog*")]


def test_the_prolog_waits_for_the_profile_and_slurm_for_the_prolog() -> None:
    """One that is cut off starts every job unchecked, or has Slurm give up on a job that it let start."""
    text = (SLURM / "prolog.sh").read_text()
    limit, end = (int(re.search(rf"^{name}=\D*(\d+)", text, re.MULTILINE)[1]) for name in ("LIMIT_S", "END_S"))
    slurm = int(re.search(r"BatchStartTimeout=(\d+)", text)[1])
    measuring = sum(
        check.seconds["quick"]
        for check in CHECKS
        if "quick" in check.seconds and "exclusive" in check.needs and not check.needs & {"run", "script"}
    )
    assert 1.5 * measuring <= limit
    assert limit + end < slurm
