"""The repair of a node as a state machine: what has been tried and what is known now decide what is done next. Pure.

::

    drained by opsd, no job on it
      -> remedy -> retest -> passed: returned
          ^         |
          |         +----> failed: the next remedy, or rma once attempts or remedies are used up

The remedies interfere more and more: end leftover processes, reset the GPUs, reload the driver, reboot. The fault
decides where to begin. A node that somebody else holds, or gives back, is left alone at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from opsd.collectors.base import RepairFact, RepairStep
from opsd.settings.sections import RepairSettings


class Remedy(StrEnum):
    """A remedy, in the order of the repair_plan."""

    PROCESSES = "end_processes"
    RESET = "reset_gpus"
    RELOAD = "reload_driver"
    REBOOT = "reboot"


REMEDIES: Final = tuple(Remedy)
TRIES: Final = {Remedy.PROCESSES: 1, Remedy.RESET: 1, Remedy.RELOAD: 1, Remedy.REBOOT: 2}
"""How often each remedy is tried: two reboots without success mean hardware (NVIDIA's guide to Xid errors)."""
TOTAL_S: Final = 86_400.0
"""After so many seconds of remedies and tests a repair is given up. Waiting is free."""
RETEST, RETURN = "retest", "return"
CUT_OFF = "cut off by the end of the program"
UNANSWERED = "Slurm has not answered the order"
"""The reboot may be under way or not; the order is given again once it is known that it is not."""
STOPPED = "stopped: "
"""Begins what is said of a test that had to make way for somebody else; it says nothing of the node."""
STOPS: Final = 10
NO_HARDWARE: Final = "not its hardware: "
"""Begins what is said of a test that could not be made, or has found nothing but what is not the node's own."""
HELD: Final = "processes that hold a GPU do not end: "
"""Begins what is said of a remedy that has ended there: of the others only a reboot can do without their end."""
CUT_OFF_RETESTS: Final = 2
"""A test that was cut off so often while the node kept running is a failed one."""

Hold = Literal["ours", "rma", "others", "nobody", "unknown"]
"""Who keeps the node out of service: opsd, opsd until it is replaced, somebody else, nobody; or Slurm does not say."""
End = Literal["returned", "rma", "left"]


@dataclass(frozen=True, slots=True)
class Case(RepairFact):
    """One repair of ``node``, which was drained with ``reason`` for a fault of ``kind``; ``first`` is where it begins.

    A person has begun it ``by_hand``, or the policy. ``verdict`` says in one sentence why it ended so. ``paused`` says
    why opsd may do nothing at this time; until ``resumed_at`` it did so last.
    """

    end: End | None = None
    first: Remedy = Remedy.PROCESSES
    format: Literal[1] = 1

    @property
    def remedies(self) -> tuple[RepairStep, ...]:
        """The remedies so far."""
        return tuple(attempt for attempt in self.attempts if attempt.what in REMEDIES)

    @property
    def last(self) -> RepairStep | None:
        return self.attempts[-1] if self.attempts else None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at the epoch second ``now``, ``uptime_s`` after the boot. ``hold_text`` says who holds the node.

    ``busy``: jobs hold it. ``rebooting``: Slurm has a reboot of it under way. ``settling``: it has just booted.
    ``recent`` are earlier repairs of the last week. ``relapsed`` says why returns of this node do not last, "" if
    nothing speaks against one; ``paused`` why opsd may do nothing at this time.
    """

    now: float
    boot: str
    hold: Hold
    hold_text: str = ""
    busy: bool = False
    rebooting: bool = False
    recent: int = 0
    relapsed: str = ""
    paused: str = ""
    uptime_s: float = 0.0
    settling: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The next step and its reason: wait, begin a remedy (``remedy``), retest, return the node, or end the case."""

    do: Literal["wait", "remedy", "retest", "return", "rma", "left"]
    why: str = ""
    remedy: Remedy | None = None


def begun(case: Case, what: str, facts: Facts) -> Case:
    """The case when ``what`` begins, to be recorded before it does.

    Of many tests in a row that made way the last gives its place to the next: the record would have no bound on a node
    that is taken again and again.
    """
    lately = case.attempts[-STOPS:]
    made_way = [one.what == what == RETEST and one.detail.startswith(STOPPED) for one in lately]
    before = case.attempts[:-1] if made_way.count(True) == STOPS else case.attempts
    return replace(case, attempts=(*before, RepairStep(what, facts.now, facts.boot, uptime_s=facts.uptime_s)))


def repeated(case: Case, facts: Facts) -> Case:
    """The case when the attempt under way starts again."""
    *before, last = case.attempts
    return noted(begun(replace(case, attempts=tuple(before)), last.what, facts), last.detail)


def ended(case: Case, ok: bool, detail: str, now: float, took_s: float = 0.0) -> Case:
    """The case after the end of what was begun last."""
    *before, last = case.attempts
    return replace(case, attempts=(*before, replace(last, ended_at=now, ok=ok, detail=detail, took_s=took_s)))


def noted(case: Case, detail: str) -> Case:
    """The case with what is known of the attempt under way."""
    *before, last = case.attempts
    return replace(case, attempts=(*before, replace(last, detail=detail)))


def closed(case: Case, end: End, verdict: str, now: float, bundle: str = "") -> Case:
    """The case at its end."""
    return replace(case, end=end, verdict=verdict, ended_at=now, bundle=bundle)


def paused(case: Case, facts: Facts) -> Case:
    """The case with what pauses it now, if anything does."""
    if not case.paused or facts.paused:
        return replace(case, paused=facts.paused)
    return replace(case, paused="", resumed_at=facts.now)


def settled(case: Case, facts: Facts, settings: RepairSettings) -> Case:
    """The case once it is known what became of an attempt that an earlier program began; unchanged while it is not."""
    last = case.last
    if last is None or last.ok is not None:
        return case
    booted = facts.boot != last.boot
    if last.what != Remedy.REBOOT:
        why = "the node booted meanwhile" if booted and last.what != RETURN else CUT_OFF
        return ended(case, False, why, facts.now)
    if booted and not facts.rebooting:
        took_s = facts.now - last.at
        if not 0 <= took_s <= settings.reboot_s:  # the clock was set, or the node was off
            return ended(case, True, "booted again", facts.now)
        return ended(case, True, f"booted again after {took_s:.0f} s", facts.now, took_s)
    took_s = facts.uptime_s - last.uptime_s
    if not booted and last.detail != UNANSWERED and took_s > settings.reboot_s:
        return ended(case, False, f"has not rebooted within {settings.reboot_s:.0f} s", facts.now, took_s)
    return case


def next_step(case: Case, facts: Facts, settings: RepairSettings) -> Step:
    """What to do now in a case that is ``settled`` and under way. What is unknown never leads to an action."""
    step = _interrupted(case, facts) or _given_up(case, facts, settings) or _onward(case, settings)
    return Step("wait", "it has just booted") if step.do == "retest" and facts.settling else step


def _interrupted(case: Case, facts: Facts) -> Step | None:
    """What keeps everybody from touching the node, or ends the case; a return that was cut off is completed."""
    last = case.last
    if facts.hold == "unknown":
        return Step("wait", "Slurm does not answer")
    if last is not None and last.what == RETURN and last.detail == CUT_OFF and facts.hold in ("ours", "nobody"):
        return Step("return", CUT_OFF)
    if facts.hold != "ours":
        texts = {"nobody": f"{case.node} is in service", "rma": f"{case.node} waits for its replacement"}
        return Step("left", texts.get(facts.hold) or facts.hold_text or f"somebody else holds {case.node}")
    if last is not None and last.ok is None:
        if last.detail == UNANSWERED and not facts.busy and not facts.rebooting:
            return Step("remedy", UNANSWERED, Remedy(last.what))
        return Step("wait", "it reboots" if last.what == Remedy.REBOOT else f"{last.what} is under way")
    if facts.busy:
        return Step("wait", "a job is still on it")
    if facts.rebooting:
        return Step("wait", "somebody has it rebooted")
    return Step("wait", facts.paused) if facts.paused else None


def _given_up(case: Case, facts: Facts, settings: RepairSettings) -> Step | None:
    """Why the repair ends without the node's return, None if it goes on."""
    last = case.last
    if last is not None and last.what == RETURN:
        return Step("left", f"it has passed its retest, and its return was refused: {last.detail}")
    if last is not None and last.what == RETEST and last.ok:
        return None
    again: Literal["rma", "left"] = "left" if case.first is Remedy.PROCESSES else "rma"  # nothing says it is hardware
    if not case.remedies and facts.relapsed:
        return Step(again, facts.relapsed)
    if not case.remedies and facts.recent >= settings.max_per_week:
        return Step(again, f"{facts.recent} repairs within a week did not last")
    if sum(attempt.took_s for attempt in case.attempts) > TOTAL_S:
        return Step(_unsuccessful(case), f"not over after {TOTAL_S / 3600:.0f} h of remedies and tests")
    return None


def _onward(case: Case, settings: RepairSettings) -> Step:
    """The return after a test that was passed, the test after a remedy, or the next remedy."""
    last = case.last
    if last is not None and last.what == RETEST and last.ok:
        return Step("return", last.detail)
    if last is not None and ((last.what in REMEDIES and last.ok) or _retest_again(case)):
        return Step("retest", last.detail)
    return _next_rung(case, settings)


def _retest_again(case: Case) -> bool:
    """Whether the last retest made way, or was cut off though the node kept running, and that not too often."""
    cut_off = 0
    if case.last is not None and case.last.detail.startswith(STOPPED):
        return case.last.what == RETEST
    for attempt in reversed(case.attempts):
        if attempt.what != RETEST or attempt.detail != CUT_OFF:
            break
        cut_off += 1
    return 0 < cut_off < CUT_OFF_RETESTS


def _next_rung(case: Case, settings: RepairSettings) -> Step:
    tried = [Remedy(attempt.what) for attempt in case.remedies]
    last = case.last
    why = last.detail if last is not None else case.reason
    if len(tried) >= settings.attempts:
        return Step(_unsuccessful(case), f"{len(tried)} attempts without success; the last: {why}")
    lowest = REMEDIES.index(Remedy.REBOOT if why.startswith(HELD) else tried[-1] if tried else case.first)
    for remedy in REMEDIES[lowest:]:
        if remedy in settings.remedies and tried.count(remedy) < TRIES[remedy]:
            return Step("remedy", why, remedy)
    if not tried:
        return Step("left", "no remedy that is allowed fits (repair.remedies)")
    attempts = f"{len(tried)} attempt{'s' * (len(tried) != 1)}"
    return Step(_unsuccessful(case), f"no remedy is left after {attempts}; the last: {why}")


def _unsuccessful(case: Case) -> Literal["rma", "left"]:
    """How a repair ends without success: nothing is to be replaced that no test after a remedy has spoken against."""
    tests = [attempt.detail for attempt in case.attempts if attempt.what == RETEST]
    return "left" if not tests or tests[-1].startswith((NO_HARDWARE, CUT_OFF, STOPPED)) else "rma"
