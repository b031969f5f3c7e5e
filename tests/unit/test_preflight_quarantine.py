"""What becomes of a node in Slurm after its verdict: `--act`, the prolog and the epilog."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from collectors.prolog import PrologCollector
from opsd.collectors.base import NoData, Reading
from opsd.config import load
from opsd.preflight.base import Verdict
from opsd.preflight.checks import CHECKS
from opsd.preflight.command import act
from opsd.preflight.report import Report, Result
from opsd.repair.after_preflight import order_for_refused_job, ordering
from opsd.repair.case_file import CaseFile
from opsd.settings.policy import PolicySettings
from opsd.slurm import node_comment
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.port import Node, SlurmError
from tests.fakes.preflight import DISK, FULL_MEMORY, GEMM, LEFTOVERS, VERSIONS, report
from tests.fakes.slurm import FakeSlurm

# `opsd preflight --act`: what becomes of a node in Slurm after its verdict.


EVIDENCE = Path("/var/lib/opsd/preflight.json")

DRAIN = frozenset({"drain"})

FAILED = "opsd: preflight quick failed: gpu_burn; see /old.json"

UNSEEN = replace(LEFTOVERS, verdict=Verdict.COULD_NOT_RUN, findings=(), reason="/proc cannot be read")


def verdict(passed: bool, **fields: object) -> Report:
    return report(VERSIONS if passed else GEMM, node="n01", **fields)


def cluster(reason: str = "", flags: frozenset[str] = frozenset(), by: str = "root") -> FakeSlurm:
    others = [Node(f"n{number:02d}", "allocated") for number in range(2, 42)]
    return FakeSlurm([Node("n01", "idle", flags, reason, by if reason else ""), *others])


def acted(slurm: FakeSlurm, found: Report) -> str:
    return act(found, EVIDENCE, SlurmDrainer(lambda: slurm, "n01", PolicySettings()), lambda: slurm)


def test_a_node_that_failed_is_drained_with_its_evidence() -> None:
    """The reason says whose it is, what failed, and where to read more."""
    slurm = cluster()
    assert acted(slurm, verdict(passed=False)) == "drained n01"
    assert slurm.updates == [(("n01",), "drain", f"opsd: preflight quick failed: gpu_burn; see {EVIDENCE}")]


def test_a_node_that_passed_is_given_back_if_a_preflight_took_it_out() -> None:
    """The same checks that kept it out let it in again."""
    slurm = cluster(FAILED, DRAIN)
    assert acted(slurm, verdict(passed=True)) == "gave n01 back to Slurm"
    assert slurm.updates == [(("n01",), "resume", "")]


def test_a_node_that_comes_back_again_and_again_is_not_given_back() -> None:
    """It passes each time and fails soon after: a check does not overrule the node's history."""
    slurm = cluster(FAILED, DRAIN)
    slurm.by_comment["n01"] = "[opsd1 preflight=100-200 preflight=300-400 preflight=500-]"
    with pytest.raises(SlurmError, match="came back to service and failed again 2 times"):
        acted(slurm, verdict(passed=True))
    assert slurm.updates == []


@pytest.mark.parametrize(
    "reason", ["replace the fan", "opsd: GPU 2 is lost", "opsd: preflight standard failed: gpu_burn; see /x.json", ""]
)
def test_a_node_that_passed_is_left_as_it_is_otherwise(reason: str) -> None:
    """People, incidents and a more thorough preflight had their own reasons."""
    slurm = cluster(reason, DRAIN if reason else frozenset())
    assert acted(slurm, verdict(passed=True)) == ""
    assert slurm.updates == []


def test_a_node_in_service_that_passed_counts_as_tested() -> None:
    """With all of the profile that a return needs, and once; what else is in its history stays."""
    slurm, found = cluster(), replace(verdict(passed=True), profile=PolicySettings().return_profile)
    slurm.by_comment["n01"] = "rack 12 [opsd1 gpu_xid=100-200]"
    drainer = SlurmDrainer(lambda: slurm, "n01", PolicySettings())
    said = [act(found, EVIDENCE, drainer, lambda: slurm, whole=whole) for whole in (False, True, True)]
    assert said == ["", "n01 counts as tested", ""]
    assert slurm.by_comment["n01"] == "rack 12 [opsd1 gpu_xid=100-200 tested=1000]"


def test_a_test_keeps_the_nvlink_domain_that_the_driver_tells() -> None:
    """For picks; a later test that tells none takes it back, and one that does not count changes nothing."""
    slurm, domain = cluster(), "5e797fc6-0f46-421a-8724-0e102c0f723c.1234"
    drainer = SlurmDrainer(lambda: slurm, "n01", PolicySettings())

    def tested(at: float, facts: dict[str, str], *, whole: bool = True) -> dict[str, str]:
        gpus = replace(VERSIONS, check="gpu_inventory", facts=facts)
        found = replace(report(gpus, node="n01", started=at), profile=PolicySettings().return_profile)
        act(found, EVIDENCE, drainer, lambda: slurm, whole=whole)
        return node_comment.domains(slurm.comments())

    assert tested(1000, {"NVLink domain": domain}) == {"n01": domain}
    assert slurm.by_comment["n01"] == f"[opsd1 tested=1000 nvl={domain}]"
    assert tested(2000, {}, whole=False) == {"n01": domain}
    assert tested(2000, {}) == {}


@pytest.mark.parametrize("node", [cluster("replace the fan", DRAIN), cluster()])
def test_a_quick_look_or_a_node_that_others_hold_does_not_count(node: FakeSlurm) -> None:
    """A quick profile proves little, and a node that is out may be worked upon."""
    found = verdict(passed=True)
    if node.by_name["n01"].reason:
        found = replace(found, profile=PolicySettings().return_profile)
    assert act(found, EVIDENCE, SlurmDrainer(lambda: node, "n01", PolicySettings()), lambda: node, whole=True) == ""
    assert "tested" not in node.by_comment.get("n01", "")


def test_an_interrupted_preflight_does_nothing() -> None:
    """It knows nothing about the node."""
    slurm = cluster()
    assert acted(slurm, verdict(passed=False, interrupted=True)) == ""
    assert slurm.updates == []


def test_somebody_elses_node_is_not_drained_again() -> None:
    """Their reason stays, and the refusal is said."""
    slurm = cluster("replace the fan", DRAIN, "alice")
    with pytest.raises(SlurmError, match="alice"):
        acted(slurm, verdict(passed=False))
    assert slurm.updates == []


@pytest.mark.parametrize(
    ("failed", "policy", "ordered"),
    [
        ((GEMM,), "act", True),
        ((GEMM,), "recommend", False),
        ((GEMM,), "observe", False),
        ((GEMM, DISK), "act", False),
        ((LEFTOVERS,), "act", True),
        ((LEFTOVERS,), "recommend", False),
        ((GEMM, FULL_MEMORY), "act", False),
        ((UNSEEN,), "act", False),
    ],
)
def test_a_node_whose_gpus_failed_or_are_held_is_repaired_if_it_may_be(
    tmp_path: Path, failed: tuple[Result, ...], policy: str, ordered: bool
) -> None:
    """With the drain, and not for what no remedy cures, as old files; nor for a node that was not drained."""
    found, slurm = report(*failed, node="n01"), cluster()
    settings = load(None, (f"policy.repair={policy}", f"agent.state_dir={tmp_path}"))
    drain = ordering(found, settings, SlurmDrainer(lambda: slurm, "n01", PolicySettings()))
    assert act(found, EVIDENCE, drain, lambda: slurm).startswith("drained n01")
    assert CaseFile(tmp_path).ordered is ordered
    CaseFile(tmp_path).drop_order()
    theirs = cluster("replace the fan", DRAIN, "alice")
    drain = ordering(found, settings, SlurmDrainer(lambda: theirs, "n01", PolicySettings()))
    with pytest.raises(SlurmError, match="alice"):
        act(found, EVIDENCE, drain, lambda: theirs)
    assert not CaseFile(tmp_path).ordered


@pytest.mark.parametrize(
    ("failed", "changed", "ordered"),
    [
        ((GEMM,), (), True),
        ((LEFTOVERS,), (), True),
        ((LEFTOVERS, GEMM), (), True),
        ((FULL_MEMORY,), (), False),
        ((LEFTOVERS,), ("policy.repair=recommend",), False),
        ((GEMM,), ("policy.drain=false",), False),
        ((GEMM,), ("policy.repair=recommend",), False),
        ((GEMM, DISK), (), False),
        ((VERSIONS,), (), False),
    ],
)
def test_a_node_that_refuses_a_job_orders_its_repair(
    tmp_path: Path, failed: tuple[Result, ...], changed: tuple[str, ...], ordered: bool
) -> None:
    """Where opsd may drain and repair; the order says since when Slurm may have drained the node for it."""
    given = ("policy.drain=true", "policy.repair=act", f"agent.state_dir={tmp_path}", *changed)
    order_for_refused_job(report(*failed, node="n01"), load(None, given))
    refusal = CaseFile(tmp_path).refusal
    assert (refusal is not None) is CaseFile(tmp_path).ordered is ordered
    assert refusal is None or refusal.failures == f"quick failed: {', '.join(one.check for one in failed)}"
    CaseFile(tmp_path).order()
    assert CaseFile(tmp_path).refusal is None


# Slurm's prolog and epilog: a node is drained for the word of a finished check, and for nothing else.


SLURM = Path(__file__).parents[2] / "deploy/slurm"

REPORT = "opsd-prolog-opsd-test.json"

REFUSED = f"this node failed its preflight, job opsd-test does not start; see REPORTS/{REPORT}"

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
        ('echo unfit >"$verdict"; exit 1', "unfit", REFUSED),
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


# The word of the last prolog as series.


def series(path: Path) -> dict[tuple[str, ...], float]:
    reading = PrologCollector(path, wall=lambda: 1000.0).collect()
    assert isinstance(reading, Reading)
    return {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples}


@pytest.mark.parametrize("word", ["fit", "unfit", "unknown"])
def test_the_word_is_a_series_and_so_is_its_age(tmp_path: Path, word: str) -> None:
    """As prolog.sh writes them."""
    (tmp_path / "word").write_text(f"{word} 900\n")
    verdicts = {("opsd_prolog_verdict", known): float(known == word) for known in ("fit", "unfit", "unknown")}
    assert series(tmp_path / "word") == verdicts | {("opsd_prolog_age_seconds",): 100.0}


@pytest.mark.parametrize(
    "content", [b"", b"fit", b"fit yesterday", b"fine 900", b"\xff\0", b"fit 900 900", b"x" * 9999]
)
def test_anything_else_is_unknown(tmp_path: Path, content: bytes) -> None:
    """And has no age."""
    (tmp_path / "word").write_bytes(content)
    found = series(tmp_path / "word")
    assert found[("opsd_prolog_verdict", "unknown")] == 1.0
    assert len(found) == 3


def test_a_node_without_a_prolog_has_no_data(tmp_path: Path) -> None:
    """Which is no error."""
    assert isinstance(PrologCollector(tmp_path / "word").collect(), NoData)
