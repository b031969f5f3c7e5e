"""The decisions of a repair: when nothing may be done, which remedy is next, and that every repair ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import RepairStep
from opsd.preflight.base import Verdict
from opsd.preflight.checks import CHECKS
from opsd.preflight.command import reason_for
from opsd.preflight.report import Result
from opsd.repair.repair_plan import (
    CUT_OFF,
    HELD,
    NO_HARDWARE,
    REMEDIES,
    RETEST,
    RETURN,
    STOPPED,
    TOTAL_S,
    TRIES,
    UNANSWERED,
    Case,
    Facts,
    Remedy,
    begun,
    ended,
    next_step,
    noted,
    repeated,
    settled,
)
from opsd.repair.retest import FAULTS, NOT_HARDWARE, begin_at, curable
from opsd.settings.sections import RepairSettings
from tests.fakes.preflight import report

CASE = Case("repair-1", "n1", "gpu_xid", "opsd:gpu_xid-1 gpu_xid: Xid 95", 0.0, first=Remedy.RESET)
FREE = Facts(1000.0, "boot-1", "ours")
LIMITS = RepairSettings()


def after(*what: tuple[str, bool], case: Case = CASE) -> Case:
    """The case once these have ended so."""
    attempts = (RepairStep(name, 900.0, "boot-1", 950.0, ok, f"{name} ended") for name, ok in what)
    return replace(case, attempts=tuple(attempts))


holds = st.sampled_from(["ours", "rma", "others", "nobody", "unknown"])
all_facts = st.builds(
    Facts, st.floats(0, 1e6), st.sampled_from(["boot-1", "boot-2"]), holds, st.just(""), st.booleans(), st.booleans(),
    st.integers(0, 9), st.sampled_from(["", "it came back and failed again"]),
)  # fmt: skip
attempts = st.builds(
    RepairStep, st.sampled_from([*REMEDIES, RETEST, RETURN]), st.floats(0, 1e6), st.sampled_from(["boot-1", "boot-2"]),
    st.just(None), st.sampled_from([None, True, False]), st.sampled_from(["", CUT_OFF, UNANSWERED]),
)  # fmt: skip
cases = st.builds(
    replace, st.just(CASE), first=st.sampled_from(REMEDIES), attempts=st.lists(attempts, max_size=8).map(tuple)
)


@given(cases, all_facts)
def test_nothing_is_done_to_a_node_that_is_not_opsds_or_not_free(case: Case, facts: Facts) -> None:
    """Whatever came before: jobs, other people's drains, a silent controller and reboots under way forbid it."""
    step = next_step(settled(case, facts, LIMITS), facts, LIMITS)
    if facts.hold != "ours" or facts.busy or facts.rebooting:
        again = facts.hold == "nobody" and step.do == "return"
        assert step.do in ("wait", "left", "rma") or again or (case.last is not None and case.last.what == RETURN)
        assert step.remedy is None
        assert step.do != "retest"
    if facts.hold in ("others", "rma", "unknown"):
        assert step.do == ("wait" if facts.hold == "unknown" else "left")


@given(cases, all_facts)
def test_a_node_is_returned_only_after_a_test_it_has_passed(case: Case, facts: Facts) -> None:
    """Or to complete a return that was cut off."""
    case = settled(case, facts, LIMITS)
    if next_step(case, facts, LIMITS).do == "return":
        assert case.last is not None
        assert (case.last.what, case.last.ok) == (RETEST, True) or case.last.what == RETURN


@given(
    st.sampled_from(REMEDIES),
    st.lists(st.booleans(), max_size=40),
    st.sets(st.sampled_from(REMEDIES)),
    st.integers(1, 5),
)
def test_every_repair_ends_within_its_limits(first: Remedy, luck: list[bool], remedies: set[Remedy], most: int) -> None:
    """However remedies and tests end: no remedy below an earlier one, none too often, none that is not allowed."""
    limits = RepairSettings(remedies=tuple(remedy.value for remedy in Remedy if remedy in remedies), attempts=most)
    case, facts, outcomes = replace(CASE, first=first), FREE, iter(luck)
    for _ in range(60):
        step = next_step(case, facts, limits)
        if step.do in ("left", "rma", "return"):
            break
        what = step.remedy or RETEST
        case = ended(begun(case, what, facts), next(outcomes, False), "", facts.now)
    else:
        pytest.fail("it does not end")
    tried = [Remedy(attempt.what) for attempt in case.remedies]
    assert tried == sorted(tried, key=REMEDIES.index)
    assert len(tried) <= most
    assert set(tried) <= remedies
    assert all(tried.count(remedy) <= TRIES[remedy] for remedy in REMEDIES)


def test_the_ladder_is_climbed_rung_by_rung() -> None:
    """A remedy is tested; one that fails, or does not help, is followed by the next; three attempts are enough."""
    assert next_step(CASE, FREE, LIMITS).remedy is Remedy.RESET
    assert next_step(after((Remedy.RESET, True)), FREE, LIMITS).do == "retest"
    assert next_step(after((Remedy.RESET, True), (RETEST, False)), FREE, LIMITS).remedy is Remedy.RELOAD
    assert next_step(after((Remedy.RESET, False)), FREE, LIMITS).remedy is Remedy.RELOAD
    tried = ((Remedy.RESET, False), (Remedy.RELOAD, False), (Remedy.REBOOT, True))
    assert next_step(after(*tried, (RETEST, True)), FREE, LIMITS).do == "return"
    last = next_step(after(*tried, (RETEST, False)), FREE, LIMITS)
    assert (last.do, last.why) == ("rma", "3 attempts without success; the last: retest ended")


def test_what_is_no_hardware_makes_no_broken_hardware() -> None:
    """Users' processes that come back after every remedy, a server that is away, a test that cannot be made: people
    have to look, and nothing is replaced. Nor is what was never tested, as no remedy could be applied.
    """
    assert {check.name for check in CHECKS} >= NOT_HARDWARE
    tried = after((Remedy.RESET, True), (RETEST, False), (Remedy.RELOAD, True), (RETEST, False), (Remedy.REBOOT, True))
    for end, detail in (("left", f"{NO_HARDWARE}storage_shared failed: away"), ("rma", "gpu_health failed")):
        case = ended(begun(tried, RETEST, FREE), False, detail, 1000.0)
        step = next_step(case, FREE, LIMITS)
        assert (step.do, step.why) == (end, f"3 attempts without success; the last: {detail}")
    untested = after((Remedy.REBOOT, False), (Remedy.REBOOT, False), case=replace(CASE, first=Remedy.REBOOT))
    assert next_step(untested, FREE, LIMITS).do == "left"
    cut = after((Remedy.REBOOT, False), (Remedy.REBOOT, True), case=replace(CASE, first=Remedy.REBOOT))
    for _ in range(2):
        cut = settled(begun(cut, RETEST, FREE), FREE, LIMITS)
    assert next_step(cut, FREE, LIMITS).do == "left"
    died = settled(begun(cut, RETEST, FREE), replace(FREE, boot="boot-2"), LIMITS)
    assert next_step(died, FREE, LIMITS).do == "rma"


def test_processes_that_do_not_end_leave_only_a_reboot() -> None:
    """A reset and a reload end them first, and would fail alike: they are no attempts."""
    stuck = replace(CASE, first=Remedy.PROCESSES)
    case = ended(begun(stuck, Remedy.PROCESSES, FREE), False, f"{HELD}4242", 1000.0)
    assert next_step(case, FREE, LIMITS).remedy is Remedy.REBOOT
    without = RepairSettings(remedies=tuple(remedy.value for remedy in REMEDIES[:-1]))
    assert next_step(case, FREE, without).why == f"no remedy is left after 1 attempt; the last: {HELD}4242"


def test_users_who_leave_processes_every_day_make_no_broken_hardware() -> None:
    """The limits of repairs hold for them as well, and people look at it."""
    case = replace(CASE, kind="preflight", first=Remedy.PROCESSES)
    for facts in (replace(FREE, recent=LIMITS.max_per_week), replace(FREE, relapsed="it failed again twice")):
        assert next_step(case, facts, LIMITS).do == "left"


def test_nothing_is_done_in_a_time_of_maintenance() -> None:
    """Not even a return: people work on the node or on the cluster."""
    for case in (CASE, after((Remedy.RESET, True)), after((Remedy.RESET, True), (RETEST, True))):
        assert next_step(case, replace(FREE, paused="maintenance: service"), LIMITS).why == "maintenance: service"


def test_two_reboots_are_enough() -> None:
    """Where a reboot is the first that can help, it is done twice."""
    case = replace(CASE, first=Remedy.REBOOT)
    once = after((Remedy.REBOOT, True), (RETEST, False), case=case)
    assert next_step(once, FREE, LIMITS).remedy is Remedy.REBOOT
    twice = after(*[(Remedy.REBOOT, True), (RETEST, False)] * 2, case=case)
    assert next_step(twice, FREE, LIMITS).do == "rma"


def test_what_does_not_last_is_not_repaired_again() -> None:
    """Many repairs in a week, and returns that others have seen fail, mean hardware."""
    assert next_step(CASE, replace(FREE, recent=LIMITS.max_per_week), LIMITS).do == "rma"
    assert next_step(CASE, replace(FREE, relapsed="it failed again twice"), LIMITS).why == "it failed again twice"


def test_a_reboot_is_over_once_the_node_has_another_boot() -> None:
    """Slurm must have seen it, too; without one in time the attempt has failed."""
    waiting = begun(CASE, Remedy.REBOOT, FREE)
    assert settled(waiting, replace(FREE, now=1100.0), LIMITS) == waiting
    assert next_step(waiting, FREE, LIMITS).do == "wait"
    booted = replace(FREE, now=1100.0, boot="boot-2")
    assert settled(waiting, replace(booted, rebooting=True), LIMITS) == waiting
    (attempt,) = settled(waiting, booted, LIMITS).attempts
    assert (attempt.ok, attempt.detail) == (True, "booted again after 100 s")
    (late,) = settled(waiting, replace(FREE, uptime_s=1.0 + LIMITS.reboot_s), LIMITS).attempts
    assert late.ok is False


def test_a_node_that_has_just_booted_is_not_tested_yet() -> None:
    """Links train, fabric manager and clock begin: a failure then would cost a second reboot, or the node."""
    booted = after((Remedy.REBOOT, True))
    assert next_step(booted, replace(FREE, settling=True), LIMITS).why == "it has just booted"
    assert next_step(booted, FREE, LIMITS).do == "retest"
    assert next_step(CASE, replace(FREE, settling=True), LIMITS).remedy is Remedy.RESET


def test_a_clock_that_is_set_fails_no_reboot_and_no_repair() -> None:
    """Neither during the boot in which it was asked for, nor by the next one; hours of waiting are no work either."""
    waiting = begun(CASE, Remedy.REBOOT, FREE)
    for now in (1000.0 - 86_400, 1000.0 + 86_400):
        assert settled(waiting, replace(FREE, now=now), LIMITS) == waiting
        booted = settled(waiting, replace(FREE, now=now, boot="boot-2"), LIMITS)
        assert (booted.attempts[0].ok, booted.attempts[0].detail) == (True, "booted again")
        assert next_step(booted, replace(FREE, now=now, boot="boot-2"), LIMITS).do == "retest"


def test_a_repair_that_has_worked_for_a_day_is_given_up() -> None:
    """By the time that remedies and tests took."""
    worked = ended(begun(CASE, Remedy.RESET, FREE), True, "", 1000.0, TOTAL_S + 1)
    assert next_step(worked, FREE, LIMITS).why == "not over after 24 h of remedies and tests"


def test_an_order_that_slurm_has_not_answered_does_not_run_out_of_time() -> None:
    """Slurm may be away for longer than a reboot takes; the time counts from the order that it took."""
    unanswered = noted(begun(CASE, Remedy.REBOOT, FREE), UNANSWERED)
    late = replace(FREE, uptime_s=1.0 + LIMITS.reboot_s)
    assert settled(unanswered, late, LIMITS) == unanswered
    again = noted(repeated(unanswered, late), "")
    assert settled(again, late, LIMITS) == again


def test_a_test_that_was_cut_off_is_repeated_once() -> None:
    """A program that was stopped says nothing of the node; a node that booted under load failed its test."""
    retesting = begun(after((Remedy.RESET, True)), RETEST, FREE)
    cut = settled(retesting, FREE, LIMITS)
    assert next_step(cut, FREE, LIMITS).do == "retest"
    again = settled(begun(cut, RETEST, FREE), FREE, LIMITS)
    assert next_step(again, FREE, LIMITS).remedy is Remedy.RELOAD
    crashed = settled(retesting, replace(FREE, boot="boot-2"), LIMITS)
    assert next_step(crashed, FREE, LIMITS).remedy is Remedy.RELOAD


def test_a_return_that_was_cut_off_is_completed() -> None:
    """It may have been done; done twice it changes nothing. But not if somebody else has taken the node meanwhile."""
    returning = begun(after((Remedy.RESET, True), (RETEST, True)), RETURN, FREE)
    for hold in ("ours", "nobody"):
        facts = replace(FREE, hold=hold)
        assert next_step(settled(returning, facts, LIMITS), facts, LIMITS).do == "return"
    facts = replace(FREE, hold="others", hold_text="n1 was taken out of service by ann: fan")
    assert next_step(settled(returning, facts, LIMITS), facts, LIMITS).do == "left"


def test_the_driver_is_asked_where_to_begin() -> None:
    """It knows better than the kind of the incident, but never less than that asks for."""
    assert begin_at(FAULTS["gpu_xid"], "", [0, 0, 1]) is Remedy.RESET
    assert begin_at(FAULTS["gpu_xid"], "", [0, 2]) is Remedy.REBOOT
    assert begin_at(FAULTS["gpu_lost"], "", [1]) is Remedy.REBOOT
    assert begin_at(FAULTS["gpu_xid"], "", [99]) is Remedy.RESET


@pytest.mark.parametrize(
    ("failed", "first"),
    [
        (["leftovers"], Remedy.PROCESSES),
        (["gpu_burn"], Remedy.RESET),
        (["leftovers", "gpu_burn"], Remedy.RESET),
        (["leftovers", "gpu_health", "gpu_burn", "gpu_memory"], Remedy.RESET),
        (["storage_shared"], Remedy.RESET),
        ([], Remedy.RESET),
    ],
)
def test_a_failed_preflight_begins_where_its_checks_say(failed: list[str], first: Remedy) -> None:
    """They stand in the reason of the drain, by the preflight's own word and by that of the prolog."""
    found = report(*(Result(name, name, Verdict.FAIL) for name in failed))
    by_prolog = f"opsd:prolog preflight: {found.failures}; Slurm's prolog refused a job"
    for told in (f"opsd: {reason_for(found, Path('/x.json'))}", by_prolog):
        assert begin_at(FAULTS["preflight"], told, []) is first
    assert begin_at(FAULTS["preflight"], told, [2]) is Remedy.REBOOT


@pytest.mark.parametrize(
    ("failed", "takes_on"),
    [
        (["gpu_burn"], True),
        (["gpu_health", "nccl_tests"], True),
        (["leftovers"], True),
        (["leftovers", "gpu_burn"], True),
        (["gpu_burn", "storage_shared"], False),
        (["leftovers", "limits"], False),
        ([], False),
    ],
)
def test_of_failed_preflights_those_of_gpus_are_for_the_ladder(failed: list[str], takes_on: bool) -> None:
    """No reset mounts a file system, and a preflight in which no check ran says nothing."""
    assert curable(failed) is takes_on


def test_faults_name_kinds_and_checks_that_exist() -> None:
    """A kind of a runbook, or a drain by preflight."""
    from opsd.preflight.checks import CHECKS
    from opsd.runbooks import RUNBOOKS

    kinds, checks = {runbook.kind for runbook in RUNBOOKS} | {"preflight"}, {check.name for check in CHECKS}
    assert set(FAULTS) <= kinds
    assert {name for fault in FAULTS.values() for name in fault.checks} <= checks


def test_a_test_that_makes_way_for_ever_is_on_record_ten_times() -> None:
    """The first times and the last: a record that grew for ever would be read by nobody in the end."""
    case = begun(CASE, RETEST, FREE)
    for number in range(1000):
        case = begun(ended(case, False, f"{STOPPED}a job is on n1, {number}", 0.0), RETEST, FREE)
    assert [attempt.detail.rpartition(" ")[2] for attempt in case.attempts] == [*"012345678", ""]
