"""A repair from its order to its end, on a cluster in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.collectors.base import RepairStep
from opsd.collectors.repairs import read
from opsd.repair.attend import SETTLED_S, RepairError
from opsd.repair.case_file import CaseError, CaseFile, Ordering, Refusal
from opsd.repair.repair_plan import NO_HARDWARE, RETURN, Remedy
from opsd.repair.retest import Retested
from opsd.slurm import node_comment
from opsd.slurm.port import Node, NodeUpdate, SlurmUnavailable
from tests.fakes.repair_bench import DRAINED, JOB, REASON, REBOOTS, Bench, PowerLoss
from tests.fakes.slurm import FakeSlurm

# A repair from the drain to its end, on a cluster in memory and a node that does as it is told.


def test_a_reset_that_helps_ends_in_a_return(tmp_path: Path) -> None:
    """One remedy, one test; Slurm has the node back and its history remembers that."""
    bench = Bench(tmp_path, cured_by=Remedy.RESET)
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
    bench = Bench(tmp_path, cured_by=Remedy.REBOOT, refused=[Remedy.RELOAD])
    case = bench.run()
    assert (case.end, bench.done) == ("returned", ["reset_gpus", "retest", "reload_driver", "reboot", "retest"])
    assert bench.slurm.reboots == [("n1", REASON)]
    assert [update for _, update, _ in bench.slurm.updates] == ["drain", "resume"]
    assert "waiting: it has just booted" in bench.said
    assert bench.uptime >= SETTLED_S


@pytest.mark.parametrize("days", [-30, -1, 1, 30])
def test_a_clock_that_is_set_at_the_boot_ends_no_repair(tmp_path: Path, days: int) -> None:
    """A node with an empty battery comes back in another year."""
    bench = Bench(tmp_path, cured_by=Remedy.REBOOT, refused=[Remedy.RELOAD], clock_step=days * 86_400.0)
    bench.now = 1e9
    case = bench.run()
    assert (case.end, [attempt.detail for attempt in case.remedies][-1]) == ("returned", "booted again")


@pytest.mark.parametrize("carried_out", [True, False])
def test_an_order_to_reboot_that_slurm_has_not_answered_is_no_failed_one(tmp_path: Path, carried_out: bool) -> None:
    """A controller that fails over would make two of them at once, and a healthy node one to be replaced."""
    lost = replace(DRAINED, reason="opsd:gpu_lost-1 gpu_lost: GPU 3")
    slurm = HalfDeaf([lost], config=REBOOTS)
    slurm.carried_out = carried_out
    bench = Bench(tmp_path, cured_by=Remedy.REBOOT, slurm=slurm)
    case = bench.run()
    assert (case.end, bench.done, len(case.remedies)) == ("returned", ["reboot", "retest"], 1)
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
    assert (case.end, case.bundle, len(case.remedies)) == ("rma", "/evidence/n1.tar.gz", 3)
    reason = bench.slurm.by_name["n1"].reason
    assert reason.startswith(
        "opsd:rma gpu_xid: 3 attempts without success; the last: gpu_health failed; see /evidence/"
    )
    assert "drain" in bench.slurm.by_name["n1"].flags
    with pytest.raises(RepairError, match="waits for its replacement"):
        bench.repair().proposed()


def test_a_gpu_that_is_still_gone_after_the_reboot_has_to_be_replaced(tmp_path: Path) -> None:
    """Slurm refuses the node's registration with a GPU less, has it reboot for ever, and would not do so again."""
    lost = replace(DRAINED, reason="opsd:gpu_lost-1 gpu_lost: GPU 3")
    refused = replace(lost, state="down", flags=frozenset({"drain", "invalid_reg", "reboot_issued"}))
    bench = Bench(tmp_path, slurm=FakeSlurm([lost], config=REBOOTS), booted=refused)
    case = bench.run()
    assert (case.end, bench.done) == ("rma", ["reboot", "retest"])
    assert [(attempt.ok, attempt.detail) for attempt in case.attempts][1:] == [
        (False, "gpu_health failed"),
        (False, "Slurm reboots it no more: it refuses its registration with less than it should have"),
    ]  # fmt: skip
    assert len(bench.slurm.reboots) == 1
    assert bench.now < 1000.0 + 600.0, "nothing is waited for"


def test_a_node_whose_test_was_passed_measures_the_network_before_its_return(tmp_path: Path) -> None:
    """Out of service still, and its record says what was found; that a network card works, only that tells."""
    passed = Retested(True, "gpu_health passed, and the network with n2")
    bench = Bench(tmp_path, cured_by=Remedy.RESET, paired=passed)
    case = bench.run()
    assert (case.end, bench.pairs, case.attempts[-2].detail) == ("returned", [(True, False, "")], passed.detail)
    card = replace(DRAINED, reason="opsd:nic_failed-1 nic_failed: mlx5_0")
    slurm = FakeSlurm([card, Node("n2", "idle")], config=REBOOTS)
    unknown = Retested(False, f"{NO_HARDWARE}the network was not tested: no node of partition checks is idle")
    bench = Bench(tmp_path / "card", cured_by=Remedy.REBOOT, slurm=slurm, paired=unknown)
    case = bench.run()
    assert (case.end, bench.pairs[0]) == ("left", (True, True, "")), "what was not tested has to be replaced by nobody"
    assert slurm.by_name["n1"].out_of_service


def test_a_node_that_fails_its_test_is_paired_with_nobody(tmp_path: Path) -> None:
    """Partners are not taken for a node that is known to be bad."""
    bench = Bench(tmp_path)
    assert (bench.run().end, bench.pairs) == ("rma", [])


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
    assert work.next(work.proposed()).remedy is Remedy.RESET
    assert bench.slurm.updates == []
    assert bench.cases.current() is None


def test_a_cluster_that_cannot_reboot_nodes_says_so(tmp_path: Path) -> None:
    """Nothing is asked of Slurm, which would wait for a boot that never comes."""
    bench = Bench(tmp_path, slurm=FakeSlurm([DRAINED], config={"RebootProgram": "(null)"}))
    case = bench.run()
    assert (case.end, bench.slurm.reboots) == ("rma", [])
    assert "set RebootProgram in slurm.conf" in case.verdict


def test_a_cluster_that_resumes_what_has_booted_says_so(tmp_path: Path) -> None:
    """With ReturnToService=2 the node would have jobs before it is tested, as soon as its slurmd registers again."""
    lost = replace(DRAINED, reason="opsd:gpu_lost-1 gpu_lost: GPU 3")
    bench = Bench(tmp_path, slurm=FakeSlurm([lost], config={**REBOOTS, "ReturnToService": "2"}))
    case = bench.run()
    assert (case.end, bench.slurm.reboots, bench.slurm.by_name["n1"]) == ("left", [], lost)
    assert "set ReturnToService=1 in slurm.conf" in case.verdict


def test_a_controller_that_is_away_is_waited_for(tmp_path: Path) -> None:
    """Nothing is done without its answer."""
    bench = Bench(tmp_path, cured_by=Remedy.RESET)
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
    bench = Bench(tmp_path, cured_by=Remedy.RESET)
    with pytest.raises(CaseError, match="without a record nothing more is done"):
        bench.repair().attend(bench.repair().proposed())
    assert bench.done == []


def test_what_a_cut_off_reset_may_have_stopped_is_started(tmp_path: Path) -> None:
    """The program was killed in the middle: the next one restores the services and goes one remedy up."""
    bench = Bench(tmp_path, cured_by=Remedy.RELOAD)
    work = bench.repair()
    case = work.proposed()
    from opsd.repair.repair_plan import Facts, begun

    bench.cases.keep(begun(case, Remedy.RESET, Facts(bench.now, bench.boot(), "ours")))
    assert bench.run().end == "returned"
    assert bench.done == ["restore", "reload_driver", "retest"]


def test_a_return_that_was_cut_off_loads_no_node_that_is_back_in_service(tmp_path: Path) -> None:
    """The program was killed once Slurm had the node back, and the next job is there."""
    bench = Bench(tmp_path, cured_by=Remedy.RESET, cured=True)
    case = replace(bench.repair().proposed(), attempts=(RepairStep(RETURN, bench.now, bench.boot()),))
    bench.cases.keep(case)
    bench.slurm.by_name["n1"] = Node("n1", "allocated")
    assert (bench.run().end, bench.loads) == ("returned", [])


def test_only_one_program_repairs(tmp_path: Path) -> None:
    """The second says so."""
    cases = CaseFile(tmp_path)
    with cases.alone(), pytest.raises(CaseError, match="under way"), CaseFile(tmp_path).alone():
        pass


class Killed(FakeSlurm):
    """Its ``call`` of so many that change a node ends the program, before or after Slurm has taken it."""

    def __init__(self, call: int, *, taken: bool) -> None:
        super().__init__([DRAINED, Node("n2", "idle")], config=REBOOTS)
        self.by_comment["n1"] = "[opsd1 gpu_xid=100-]"
        self._left, self._taken = call, taken

    def update_nodes(self, names: Sequence[str], update: NodeUpdate, reason: str = "") -> None:
        self._once(lambda: super(Killed, self).update_nodes(names, update, reason))

    def set_comment(self, name: str, text: str) -> None:
        self._once(lambda: super(Killed, self).set_comment(name, text))

    def reboot(self, name: str, reason: str) -> None:
        self._once(lambda: super(Killed, self).reboot(name, reason))

    def _once(self, change: Callable[[], None]) -> None:
        self._left -= 1
        if self._left or self._taken:
            change()
        if not self._left:
            raise PowerLoss


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("cured_by", [Remedy.REBOOT, None])
def test_a_repair_killed_at_an_order_to_slurm_ends_as_if_it_had_not_been(
    tmp_path: Path, call: int, taken: bool, cured_by: Remedy | None
) -> None:
    """Also the node's history, and a node that was not rebooted at all has none to be replaced for."""
    bench = Bench(tmp_path, cured_by=cured_by, refused=[Remedy.RELOAD], slurm=Killed(call, taken=taken))
    case = bench.run()
    assert bench.done == ["reset_gpus", "retest", "reload_driver", "reboot", "retest"]
    assert [one.end for one in bench.cases.past()] == [case.end]
    assert (case.end, case.bundle) == (("returned", "") if cured_by else ("rma", "/evidence/n1.tar.gz"))
    assert bench.slurm.by_name["n1"].usable is bool(cured_by)
    assert node_comment.read(bench.slurm.by_comment["n1"]).out is not bool(cured_by)


def test_a_repair_is_the_newest_also_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """By its name, by which the newest is known and old ones go; and none takes the place of another."""
    ahead = Bench(tmp_path, cured_by=Remedy.RESET, now=2e9)
    first = ahead.run()
    names = [first.id]
    for now in (2e9, 1000.0, 1000.0, 2.1e9):
        again = Bench(tmp_path, cured_by=Remedy.RESET, now=now)
        names.append(again.run().id)
        assert [case.id for case in again.cases.past()] == names
    assert names[1:4] == [f"{first.id}x000{number}" for number in (1, 2, 3)]
    known = read(tmp_path / "repair")
    assert known is not None
    assert [repair.id for repair in known.repairs] == names


# How a repair begins: with the agent's drain, or with a job that the node refused.


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


# A node that jobs or other people have, before a repair or in the middle of one.


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
