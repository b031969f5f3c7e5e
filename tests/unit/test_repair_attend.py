"""A repair from the drain to its end, on a cluster in memory and a node that does as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from opsd.repair.attend import Means, Repair, RepairError
from opsd.repair.case_file import CaseError, CaseFile
from opsd.repair.ladder import RETURN, Attempt, Case, Limits, Rung
from opsd.repair.machine import RungError
from opsd.repair.order import Ordering
from opsd.repair.retest import Retested
from opsd.slurm import node_comment
from opsd.slurm.ownership import PreflightResult, Rules
from opsd.slurm.port import Job, Node, SlurmUnavailable
from tests.fakes.slurm import FakeSlurm

REASON = "opsd:gpu_xid-1 gpu_xid: Xid 95"
DRAINED = Node("n1", "idle", frozenset({"drain"}), REASON, "root", 100.0)
JOB = Job(7, "running", "", "ann", "train", ("n1",), "n1", None, None, None, 0, "run")
REBOOTS = {"RebootProgram": "/sbin/reboot"}


class PowerLoss(Exception):
    """The end of the program, as a reboot brings it."""


@dataclass
class Bench:
    """A node and all around it. ``cured_by`` is the remedy that helps, ``refused`` are those that fail."""

    folder: Path
    cured_by: Rung | None = None
    refused: Sequence[Rung] = ()
    asks: Sequence[int] = ()
    slurm: FakeSlurm = field(default_factory=lambda: FakeSlurm([DRAINED, Node("n2", "idle")], config=REBOOTS))
    now: float = 1000.0
    boots: int = 1
    done: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    cured: bool = False
    waits: int = 0
    uptime: float = 50.0
    by_policy: bool = False
    loads: list[str] = field(default_factory=list)
    clock_step: float = 0.0

    def boot(self) -> str:
        return f"boot-{self.boots}"

    def uptime_s(self) -> float:
        return self.uptime

    def recovery_actions(self) -> Sequence[int]:
        return self.asks

    def end_processes(self) -> str:
        return self._remedy(Rung.PROCESSES)

    def reset_gpus(self) -> str:
        return self._remedy(Rung.RESET)

    def reload_driver(self) -> str:
        return self._remedy(Rung.RELOAD)

    def restore(self) -> None:
        self.done.append("restore")

    def _remedy(self, rung: Rung) -> str:
        current = self.cases.current()
        assert current is not None and current.last is not None
        assert (current.last.what, current.last.ok) == (rung, None), "it is on the disk before it begins"
        self.done.append(rung)
        if rung in self.refused:
            raise RungError(f"{rung} failed")
        self.cured |= rung is self.cured_by
        return "done"

    def retest(self, checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        assert "gpu_health" in checks
        current = self.cases.current()
        assert current is not None and current.last is not None
        assert (current.last.what, current.last.ok) == ("retest", None), "it is on the disk before it begins"
        self.done.append("retest")
        return Retested(self.cured, "gpu_health passed" if self.cured else "gpu_health failed")

    def as_spare(self, stop: Callable[[], str]) -> str:
        assert (stop(), self.slurm.by_name["n1"].out_of_service) == ("", True), "a load on a node in service"
        self.loads.append("spare")
        return "ready as a spare"

    def sleep(self, seconds: float) -> None:
        """Time goes by; a reboot that was asked for takes the node and this program down."""
        self.now += seconds
        self.uptime += seconds
        self.waits += 1
        if self.slurm.reboots and "reboot" not in self.done:
            self.done.append("reboot")
            self.boots += 1
            self.now += self.clock_step
            self.uptime = 30.0
            self.cured |= self.cured_by is Rung.REBOOT
            down = Node("n1", "down", frozenset(), f"{REASON} : reboot issued : reboot complete", "root", 100.0)
            self.slurm.by_name["n1"] = down
            raise PowerLoss

    @property
    def cases(self) -> CaseFile:
        return CaseFile(self.folder)

    def repair(self) -> Repair:
        means = Means(
            slurm=self.slurm,
            machine=self,
            release=lambda jobs: f"asked {len(jobs)} jobs",
            retest=self.retest,
            proof=lambda: PreflightResult(self.now, self.cured),
            bundle=lambda case: f"/evidence/{case.node}.tar.gz",
            as_spare=self.as_spare,
            say=self.said.append,
            clock=lambda: self.now,
            sleep=self.sleep,
            by_policy=self.by_policy,
        )
        return Repair("n1", self.cases, means, Rules(), Limits())

    def run(self) -> Case:
        """The whole repair, taken up again after each reboot."""
        case = self.cases.current()
        while True:
            work = self.repair()
            if case is None:
                case = work.proposed()
                self.cases.keep(case)
            try:
                return work.attend(case)
            except PowerLoss:
                case = self.cases.current()


def test_a_reset_that_helps_ends_in_a_return(tmp_path: Path) -> None:
    """One remedy, one test; Slurm has the node back and its history remembers that."""
    bench = Bench(tmp_path, cured_by=Rung.RESET)
    bench.slurm.by_comment["n1"] = "[opsd1 gpu_xid=100-]"
    case = bench.run()
    assert (case.end, bench.done, bench.loads) == ("returned", ["reset_gpus", "retest"], ["spare"])
    assert bench.slurm.by_name["n1"].usable
    history = node_comment.read(bench.slurm.by_comment["n1"])
    assert [stay.back for stay in history.stays] == [bench.now]
    assert history.tested_at == bench.now
    assert bench.cases.current() is None
    assert [past.verdict for past in bench.cases.past()] == ["returned after reset_gpus"]


def test_a_repair_goes_on_after_the_reboot(tmp_path: Path) -> None:
    """The node is drained again at once, since it is only down after a reboot, and returned once it is tested."""
    bench = Bench(tmp_path, cured_by=Rung.REBOOT, refused=[Rung.RELOAD])
    case = bench.run()
    assert (case.end, bench.done) == ("returned", ["reset_gpus", "retest", "reload_driver", "reboot", "retest"])
    assert bench.slurm.reboots == [("n1", REASON)]
    assert [update for _, update, _ in bench.slurm.updates] == ["drain", "resume"]


@pytest.mark.parametrize("days", [-30, -1, 1, 30])
def test_a_clock_that_is_set_at_the_boot_ends_no_repair(tmp_path: Path, days: int) -> None:
    """A node with an empty battery comes back in another year."""
    bench = Bench(tmp_path, cured_by=Rung.REBOOT, refused=[Rung.RELOAD], clock_step=days * 86_400.0)
    bench.now = 1e9
    case = bench.run()
    assert (case.end, [attempt.detail for attempt in case.rungs][-1]) == ("returned", "booted again")


@pytest.mark.parametrize("carried_out", [True, False])
def test_an_order_to_reboot_that_slurm_has_not_answered_is_no_failed_one(tmp_path: Path, carried_out: bool) -> None:
    """A controller that fails over would make two of them at once, and a healthy node one to be replaced."""
    lost = replace(DRAINED, reason="opsd:gpu_lost-1 gpu_lost: GPU 3")
    slurm = HalfDeaf([lost], config=REBOOTS)
    slurm.carried_out = carried_out
    bench = Bench(tmp_path, cured_by=Rung.REBOOT, slurm=slurm)
    case = bench.run()
    assert (case.end, bench.done, len(case.rungs)) == ("returned", ["reboot", "retest"], 1)
    assert len(slurm.reboots) == 1


class HalfDeaf(FakeSlurm):
    """Its answers to the first three orders to reboot are lost; the first may be ``carried_out`` all the same."""

    carried_out = False
    lost = 0

    def reboot(self, name: str, reason: str) -> None:
        if self.lost == 3:
            return super().reboot(name, reason)
        self.lost += 1
        if self.carried_out:
            super().reboot(name, reason)
        raise SlurmUnavailable("scontrol reboot: Socket timed out on send/recv operation")


def test_a_node_that_nothing_cures_has_to_be_replaced(tmp_path: Path) -> None:
    """After three attempts; the reason in Slurm says so and where the evidence is, and nothing is tried again."""
    bench = Bench(tmp_path)
    case = bench.run()
    assert (case.end, case.bundle, len(case.rungs)) == ("rma", "/evidence/n1.tar.gz", 3)
    reason = bench.slurm.by_name["n1"].reason
    assert reason.startswith(
        "opsd:rma gpu_xid: 3 attempts without success; the last: gpu_health failed; see /evidence/"
    )
    assert "drain" in bench.slurm.by_name["n1"].flags
    with pytest.raises(RepairError, match="waits for its replacement"):
        bench.repair().proposed()


def test_a_node_that_dies_under_load_is_not_tested_for_ever(tmp_path: Path) -> None:
    """Each test that ends in a boot of the node is a failed one, and after three remedies it is over."""
    bench = Bench(tmp_path)
    boots = 0

    def retest(checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        nonlocal boots
        boots += 1
        bench.boots += 1
        raise PowerLoss

    bench.retest = retest  # type: ignore[method-assign]
    case = bench.run()
    assert (case.end, boots) == ("rma", 3)
    assert case.verdict == "3 attempts without success; the last: the node booted meanwhile"


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """A node that is only down stays so while a person asks what would be done."""
    down = Node("n1", "down", frozenset(), REASON, "root", 100.0)
    bench = Bench(tmp_path, slurm=FakeSlurm([down]))
    work = bench.repair()
    assert work.next(work.proposed()).rung is Rung.RESET
    assert bench.slurm.updates == []
    assert bench.cases.current() is None


def test_a_cluster_that_cannot_reboot_nodes_says_so(tmp_path: Path) -> None:
    """Nothing is asked of Slurm, which would wait for a boot that never comes."""
    bench = Bench(tmp_path, slurm=FakeSlurm([DRAINED], config={"RebootProgram": "(null)"}))
    case = bench.run()
    assert (case.end, bench.slurm.reboots) == ("rma", [])
    assert "set RebootProgram in slurm.conf" in case.verdict


def test_nothing_is_done_while_a_job_is_there(tmp_path: Path) -> None:
    """Suspended ones count, too."""
    bench = Bench(tmp_path, cured_by=Rung.RESET)
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
    bench = Bench(tmp_path, cured_by=Rung.RESET)

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
    bench = Bench(tmp_path, cured_by=Rung.RESET)

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
    bench = Bench(tmp_path, cured_by=Rung.RESET)
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
    assert Bench(tmp_path / "hand", cured_by=Rung.RESET, slurm=FakeSlurm([serviced])).run().end == "returned"
    bench = Bench(tmp_path / "policy", cured_by=Rung.RESET, slurm=FakeSlurm([serviced]), by_policy=True)

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


def test_a_controller_that_is_away_is_waited_for(tmp_path: Path) -> None:
    """Nothing is done without its answer."""
    bench = Bench(tmp_path, cured_by=Rung.RESET)
    case = bench.repair().proposed()
    bench.slurm.error = SlurmUnavailable("no answer")

    def sleep(_seconds: float) -> None:
        assert not bench.done
        bench.slurm.error = None

    bench.sleep = sleep  # type: ignore[method-assign]
    assert bench.repair().attend(case).end == "returned"


def test_without_a_record_nothing_is_done(tmp_path: Path) -> None:
    """A state folder that cannot be written stops the repair before it begins."""
    (tmp_path / "repair").write_text("in the way")
    bench = Bench(tmp_path, cured_by=Rung.RESET)
    with pytest.raises(CaseError, match="nothing was done"):
        bench.repair().attend(bench.repair().proposed())
    assert bench.done == []


def test_what_a_cut_off_reset_may_have_stopped_is_started(tmp_path: Path) -> None:
    """The program was killed in the middle: the next one restores the services and goes one rung up."""
    bench = Bench(tmp_path, cured_by=Rung.RELOAD)
    work = bench.repair()
    case = work.proposed()
    from opsd.repair.ladder import Facts, begun

    bench.cases.keep(begun(case, Rung.RESET, Facts(bench.now, bench.boot(), "ours")))
    assert bench.run().end == "returned"
    assert bench.done == ["restore", "reload_driver", "retest"]


def test_a_return_that_was_cut_off_loads_no_node_that_is_back_in_service(tmp_path: Path) -> None:
    """The program was killed once Slurm had the node back, and the next job is there."""
    bench = Bench(tmp_path, cured_by=Rung.RESET, cured=True)
    case = replace(bench.repair().proposed(), attempts=(Attempt(RETURN, bench.now, bench.boot()),))
    bench.cases.keep(case)
    bench.slurm.by_name["n1"] = Node("n1", "allocated")
    assert (bench.run().end, bench.loads) == ("returned", [])


def test_only_one_program_repairs(tmp_path: Path) -> None:
    """The second says so."""
    cases = CaseFile(tmp_path)
    with cases.alone(), pytest.raises(CaseError, match="under way"), CaseFile(tmp_path).alone():
        pass


def test_the_agent_orders_a_repair_with_the_drain(tmp_path: Path) -> None:
    """In mode act a file is all that it leaves; in mode recommend it says what could be done."""
    acting = Ordering(lambda node, _reason: f"drained {node}", tmp_path, acting=True)
    assert acting("n1", REASON) == "drained n1; its repair is ordered"
    assert CaseFile(tmp_path).ordered
    CaseFile(tmp_path).drop_order()
    assert "opsd repair --act" in Ordering(lambda node, _reason: node, tmp_path, acting=False)("n1", REASON)
    assert not CaseFile(tmp_path).ordered


REFUSED_AT = 900.0
BY_PROLOG = Node("n1", "idle", frozenset({"drain"}), "Prolog error", "slurm", REFUSED_AT + 3)


def test_a_node_that_refused_a_job_is_repaired_as_opsds_own(tmp_path: Path) -> None:
    """Slurm has drained it for the word of opsd's prolog: the drain is in the node's history like any of opsd's."""
    bench = Bench(tmp_path, cured_by=Rung.RESET, slurm=FakeSlurm([BY_PROLOG, Node("n2", "idle")]))

    def retest(checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        assert checks == ()
        return Retested(bench.cured, "passed")

    bench.retest = retest  # type: ignore[method-assign]
    bench.repair().adopt(REFUSED_AT)
    assert bench.slurm.by_name["n1"].reason.startswith("opsd:prolog preflight: ")
    case = bench.run()
    assert (case.kind, case.end, bench.done) == ("preflight", "returned", ["reset_gpus"])
    (stay,) = node_comment.read(bench.slurm.by_comment["n1"]).stays
    assert (stay.kind, stay.out, stay.back) == ("preflight", 1000.0, bench.now)


@pytest.mark.parametrize(
    "node",
    [
        replace(BY_PROLOG, reason="replace the fan", reason_by="ann"),
        replace(BY_PROLOG, reason_at=REFUSED_AT - 3600.0),
        replace(BY_PROLOG, reason_at=None),
        DRAINED,
    ],
)
def test_a_drain_for_something_else_is_not_taken_over(tmp_path: Path, node: Node) -> None:
    """A person's, opsd's own, and those of other failures of a prolog."""
    bench = Bench(tmp_path, slurm=FakeSlurm([node]))
    bench.repair().adopt(REFUSED_AT)
    assert bench.slurm.updates == []


def test_slurm_drains_a_node_some_time_after_its_prolog_refused_a_job(tmp_path: Path) -> None:
    """The order waits for that, but not for ever."""
    bench = Bench(tmp_path, slurm=FakeSlurm([Node("n1", "idle")]))
    with pytest.raises(SlurmUnavailable, match="is not drained yet"):
        bench.repair().adopt(bench.now - 1)
    bench.repair().adopt(bench.now - 301)
    assert bench.slurm.updates == []


def test_opsd_takes_over_no_more_nodes_than_it_may_hold(tmp_path: Path) -> None:
    """The others stay drained, as Slurm has them."""
    bench = Bench(tmp_path, slurm=FakeSlurm([BY_PROLOG, replace(DRAINED, name="n2")]))
    with pytest.raises(RepairError, match="opsd holds 1 of 2 nodes already"):
        bench.repair().adopt(REFUSED_AT)
    assert bench.slurm.by_name["n1"] == BY_PROLOG
