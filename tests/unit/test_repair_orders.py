"""How a repair begins: with the agent's drain, or with a job that the node refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.repair.attend import RepairError
from opsd.repair.case_file import CaseFile, Refusal
from opsd.repair.order import Ordering
from opsd.repair.repair_plan import Remedy
from opsd.repair.retest import Retested
from opsd.slurm import node_comment
from opsd.slurm.port import Node, SlurmUnavailable
from tests.fakes.repair_bench import DRAINED, REASON, Bench
from tests.fakes.slurm import FakeSlurm

REFUSED = Refusal(900.0, "quick failed: gpu_burn")
BY_PROLOG = Node("n1", "idle", frozenset({"drain"}), "Prolog error", "slurm", REFUSED.at + 3)


def test_the_agent_orders_a_repair_with_the_drain(tmp_path: Path) -> None:
    """In mode act a file is all that it leaves; in mode recommend it says what could be done."""
    acting = Ordering(lambda node, _reason: f"drained {node}", tmp_path, acting=True)
    assert acting("n1", REASON) == "drained n1; its repair is ordered"
    assert CaseFile(tmp_path).ordered
    CaseFile(tmp_path).drop_order()
    assert "opsd repair --act" in Ordering(lambda node, _reason: node, tmp_path, acting=False)("n1", REASON)
    assert not CaseFile(tmp_path).ordered


@pytest.mark.parametrize(
    ("failed", "cure"),
    [("gpu_burn", Remedy.RESET), ("leftovers", Remedy.PROCESSES), ("leftovers, gpu_burn", Remedy.RESET)],
)
def test_a_node_that_refused_a_job_is_repaired_as_opsds_own(tmp_path: Path, failed: str, cure: Remedy) -> None:
    """Slurm has drained it for the word of opsd's prolog: the drain is in the node's history like any of opsd's. What
    has failed there says with which remedy the repair begins, and each step of it is on the disk.
    """
    bench = Bench(tmp_path, cured_by=cure, slurm=FakeSlurm([BY_PROLOG, Node("n2", "idle")]))

    def retest(checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        assert checks == ()
        return Retested(bench.cured, "passed")

    bench.retest = retest  # type: ignore[method-assign]
    bench.cases.order(f"quick failed: {failed}")
    refusal = bench.cases.refusal
    assert refusal is not None
    bench.repair().adopt(refusal._replace(at=REFUSED.at))
    assert (
        bench.slurm.by_name["n1"].reason == f"opsd:prolog preflight: {refusal.failures}; Slurm's prolog refused a job"
    )
    case = bench.run()
    assert (case.kind, case.end, bench.done) == ("preflight", "returned", [cure])
    assert [attempt.what for attempt in bench.cases.past()[0].attempts] == [cure, "retest", "return"]
    (stay,) = node_comment.read(bench.slurm.by_comment["n1"]).stays
    assert (stay.kind, stay.out, stay.back) == ("preflight", 1000.0, bench.now)


@pytest.mark.parametrize(
    "node",
    [
        replace(BY_PROLOG, reason="replace the fan", reason_by="ann"),
        replace(BY_PROLOG, reason_at=REFUSED.at - 3600.0),
        replace(BY_PROLOG, reason_at=None),
        DRAINED,
    ],
)
def test_a_drain_for_something_else_is_not_taken_over(tmp_path: Path, node: Node) -> None:
    """A person's, opsd's own, and those of other failures of a prolog."""
    bench = Bench(tmp_path, slurm=FakeSlurm([node]))
    bench.repair().adopt(REFUSED)
    assert bench.slurm.updates == []


def test_an_order_of_something_else_is_no_refusal(tmp_path: Path) -> None:
    """Whoever makes the file by hand asks for the repair of a node that is drained."""
    cases = CaseFile(tmp_path)
    cases.order()
    (tmp_path / "repair/order").write_text("please\n")
    assert (cases.ordered, cases.refusal) == (True, None)


def test_slurm_drains_a_node_some_time_after_its_prolog_refused_a_job(tmp_path: Path) -> None:
    """The order waits for that, but not for ever."""
    bench = Bench(tmp_path, slurm=FakeSlurm([Node("n1", "idle")]))
    with pytest.raises(SlurmUnavailable, match="is not drained yet"):
        bench.repair().adopt(REFUSED._replace(at=bench.now - 1))
    bench.repair().adopt(REFUSED._replace(at=bench.now - 301))
    assert bench.slurm.updates == []


def test_opsd_takes_over_no_more_nodes_than_it_may_hold(tmp_path: Path) -> None:
    """The others stay drained, as Slurm has them."""
    bench = Bench(tmp_path, slurm=FakeSlurm([BY_PROLOG, replace(DRAINED, name="n2")]))
    with pytest.raises(RepairError, match="opsd holds 1 of 2 nodes already"):
        bench.repair().adopt(REFUSED)
    assert bench.slurm.by_name["n1"] == BY_PROLOG
