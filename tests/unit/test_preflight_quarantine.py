"""`opsd preflight --act`: what becomes of a node in Slurm after its verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opsd.config import load
from opsd.preflight.base import Verdict
from opsd.preflight.command import act
from opsd.preflight.report import Report, Result
from opsd.repair.after_preflight import order_for_refused_job, ordering
from opsd.repair.case_file import CaseFile
from opsd.settings.policy import PolicySettings
from opsd.slurm import node_comment
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.port import Node, SlurmError
from tests.fakes.preflight_reports import DISK, FULL_MEMORY, GEMM, LEFTOVERS, VERSIONS, report
from tests.fakes.slurm import FakeSlurm

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
