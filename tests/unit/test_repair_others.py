"""A node that jobs or other people have, before a repair or in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.repair.attend import RepairError
from opsd.repair.repair_plan import Remedy
from opsd.repair.retest import Retested
from opsd.slurm.port import Node, SlurmUnavailable
from tests.fakes.repair_bench import DRAINED, JOB, Bench, PowerLoss
from tests.fakes.slurm import FakeSlurm


def test_nothing_is_done_while_a_job_is_there(tmp_path: Path) -> None:
    """Suspended ones count, too."""
    bench = Bench(tmp_path, cured_by=Remedy.RESET)
    bench.slurm = FakeSlurm([DRAINED], jobs=[replace(JOB, state="suspended")])

    def sleep(seconds: float) -> None:
        assert not bench.done
        bench.waits += 1
        if bench.waits == 3:
            bench.slurm = FakeSlurm([Node("n1", "idle")])
            raise PowerLoss

    bench.sleep = sleep  # type: ignore[method-assign]
    case = bench.run()
    assert (case.end, bench.done) == ("left", [])
    assert bench.said[:2] == ["waiting: a job is still on it", "asked 1 jobs"]


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (replace(DRAINED, reason="replace the fan", reason_by="ann"), "by ann: replace the fan"),
        (Node("n1", "idle"), "in service"),
        (replace(DRAINED, reason="opsd:manual fan_failing: fan 3"), "no remedy fits fan_failing"),
        (replace(DRAINED, reason="opsd:rma gpu_xid: twice"), "waits for its replacement"),
    ],
)
def test_other_peoples_nodes_are_left_alone(tmp_path: Path, node: Node, why: str) -> None:
    """And those in service, those that wait for a replacement, and faults that no remedy fits."""
    bench = Bench(tmp_path, slurm=FakeSlurm([node]))
    with pytest.raises(RepairError, match=why):
        bench.repair().proposed()
    assert bench.slurm.updates == []


def test_a_node_that_somebody_takes_meanwhile_is_left_to_them(tmp_path: Path) -> None:
    """After the reset a person has drained it for a reason of their own."""
    bench = Bench(tmp_path, cured_by=Remedy.RESET)

    def retest(checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        bench.slurm.by_name["n1"] = replace(DRAINED, reason="mine now", reason_by="ann")
        return Retested(True, "passed")

    bench.retest = retest  # type: ignore[method-assign]
    case = bench.run()
    assert (case.end, "by ann: mine now" in case.verdict, bench.slurm.updates) == ("left", True, [])


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        (Node("n1", "allocated"), "a job is on n1"),
        (Node("n1", "idle"), "n1 is in service"),
        (replace(DRAINED, reason="mine now", reason_by="ann"), "by ann: mine now"),
    ],
)
def test_a_test_ends_where_somebody_takes_the_node_in_the_middle(tmp_path: Path, taken: Node, why: str) -> None:
    """A profile takes hours under full load; who resumes the node by hand has no idea of it, nor has the next job."""
    bench = Bench(tmp_path, cured_by=Remedy.RESET)

    def retest(checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        assert stop() == ""
        bench.slurm.error = SlurmUnavailable("no answer")
        assert stop() == "", "who is not known to have taken it has not"
        bench.slurm.error = None
        bench.slurm.by_name["n1"] = taken
        return Retested(False, stop())

    bench.retest = retest  # type: ignore[method-assign]
    case = bench.run()
    assert case.last is not None
    assert why in case.last.detail
    assert (case.end, bench.done, bench.slurm.updates) == ("left", ["reset_gpus"], [])


def test_a_test_that_made_way_for_a_job_is_made_again_after_it(tmp_path: Path) -> None:
    """However often: the node is opsd's all the time, and nothing was found against the remedy."""
    bench = Bench(tmp_path, cured_by=Remedy.RESET)
    taken = iter([True, True, True, False])

    def retest(checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        if next(taken):
            bench.slurm.by_name["n1"] = replace(DRAINED, state="allocated")
            return Retested(False, stop(), stopped=True)
        bench.cured = True
        return Retested(True, "passed")

    def sleep(seconds: float) -> None:
        bench.slurm.by_name["n1"] = DRAINED

    bench.retest, bench.sleep = retest, sleep  # type: ignore[method-assign]
    case = bench.run()
    assert (case.end, bench.done, len(case.attempts)) == ("returned", ["reset_gpus"], 6)


def test_a_repair_waits_for_the_end_of_a_reservation_for_maintenance(tmp_path: Path) -> None:
    """People flash firmware there: no reset, no reboot, no load, but what a person orders by hand."""
    serviced = replace(DRAINED, flags=frozenset({"drain", "maintenance", "reserved"}))
    assert Bench(tmp_path / "hand", cured_by=Remedy.RESET, slurm=FakeSlurm([serviced])).run().end == "returned"
    bench = Bench(tmp_path / "policy", cured_by=Remedy.RESET, slurm=FakeSlurm([serviced]), by_policy=True)

    def sleep(_seconds: float) -> None:
        assert not bench.done
        current = bench.cases.current()
        assert current is not None and "maintenance" in current.paused
        bench.now += 86_400.0
        bench.slurm.by_name["n1"] = DRAINED

    bench.sleep = sleep  # type: ignore[method-assign, assignment]
    case = bench.run()
    assert (case.end, case.paused, case.resumed_at) == ("returned", "", 87_400.0)
    assert bench.said[0] == "waiting: Slurm has it in a reservation for maintenance"


@pytest.mark.parametrize("flag", ["powering_down", "powered_down"])
def test_a_node_that_slurm_switches_off_to_save_power_has_failed_no_test(tmp_path: Path, flag: str) -> None:
    """Drained nodes are idle to SuspendTime: the test makes way, nothing is begun, and all goes on once it is back."""
    off = replace(DRAINED, flags=DRAINED.flags | {flag})
    bench = Bench(tmp_path, slurm=FakeSlurm([off]), cured_by=Remedy.RESET)
    tests = 0

    def retest(checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        nonlocal tests
        tests += 1
        if tests == 2:
            bench.cured = True
            return Retested(True, "passed")
        bench.slurm.by_name["n1"] = off
        return Retested(False, stop(), stopped=True)

    def sleep(_seconds: float) -> None:
        assert len(bench.done) == tests
        bench.waits += 1
        bench.slurm.by_name["n1"] = DRAINED

    bench.retest, bench.sleep = retest, sleep  # type: ignore[method-assign]
    case = bench.run()
    assert (case.end, bench.done, tests, bench.waits) == ("returned", ["reset_gpus"], 2, 2)
    assert "save power" in case.attempts[1].detail
