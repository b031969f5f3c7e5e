"""Carries out a repair, one step after the other: each is recorded before it begins, and survives a reboot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from opsd.repair import repair_plan
from opsd.repair.case_file import CaseFile, Refusal
from opsd.repair.machine import Machine, RemedyError
from opsd.repair.repair_plan import Case, End, Facts, Hold, Remedy, Step
from opsd.repair.retest import FAULTS, Retested, begin_at
from opsd.settings.policy import PolicySettings
from opsd.settings.sections import RepairSettings
from opsd.slurm import drain, node_comment, ownership
from opsd.slurm.output import CONFIGURED_NOT
from opsd.slurm.ownership import PreflightResult
from opsd.slurm.port import Job, Node, Slurm, SlurmError, SlurmUnavailable

POLL_S, JOBS_POLL_S = 5.0, 15.0
"""Seconds between two looks at Slurm while a repair waits; the same while jobs hold the node, which may take days."""
SLURMS_REASON = "Prolog error"
"""Slurm's reason for a node that it has drained because its Prolog failed."""
DRAINED_WITHIN_S = 300.0
"""Seconds after a refused job within which Slurm has drained the node for it, or it was for something else."""
SETTLED_S: Final = 180.0
"""After a boot: before that links, the NVLink fabric and the clock may fail a test of a good node."""
REBOOTING: Final = frozenset({"reboot_requested", "reboot_issued"})
"""For ever, to Slurm 22.05.8, where a node has booted with a GPU less: it refuses the registration (invalid_reg)."""
STUCK: Final = frozenset({"invalid_reg", "reboot_issued"})
"""Then the last reboot is under way for ever, and Slurm carries out no other, though it takes the order (22.05.8)."""
POWER_SAVING: Final = frozenset({"power_down", "powering_down", "powered_down"})
SWITCHED_OFF: Final = "Slurm switches it off to save power (SuspendTime in slurm.conf)"
RMA = "rma"
"""Takes the place of the incident in the reason of a node that has to be replaced."""


class RepairError(Exception):
    """There is nothing to repair, or it cannot be done here; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a repair works with.

    ``release`` has jobs give the node back that no longer use it, and says what was done. ``retest`` runs checks under
    load until they end or its second argument says why they must, ``proof`` is the newest preflight that a return
    needs, ``bundle`` makes the archive of evidence and returns its path, ``as_spare`` tests the node as a spare before
    its return, where it is one, and may say something. ``pair`` tests the network of a node that has passed, which some
    faults need. ``paused`` says why nothing may be done about a kind of incident now, "" if it may. ``by_policy``:
    nobody has begun it by hand, so that it waits where people are at work.
    """

    slurm: Slurm
    machine: Machine
    release: Callable[[Sequence[Job]], str]
    retest: Callable[[Sequence[str], Callable[[], str]], Retested]
    proof: Callable[[], PreflightResult | None]
    bundle: Callable[[Case], str]
    as_spare: Callable[[Callable[[], str]], str]
    say: Callable[[str], None]
    pair: Callable[[Retested, bool, Callable[[], str]], Retested] = lambda passed, _needed, _stop: passed
    paused: Callable[[str, float], str] = lambda _kind, _now: ""
    by_policy: bool = False
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Repair:
    """The repair of ``node``, this machine."""

    def __init__(
        self, node: str, file: CaseFile, dependencies: Dependencies, policy: PolicySettings, settings: RepairSettings
    ) -> None:
        self._node, self._file, self._dependencies, self._policy, self._settings = (
            node,
            file,
            dependencies,
            policy,
            settings,
        )

    def proposed(self) -> Case:
        """A new case for what the node was drained for, not recorded yet. Raises RepairError and SlurmError."""
        now = self._dependencies.clock()
        found = self._found()
        hold, text = held_by(found)
        if found is None or hold != "ours":
            known = {"nobody": f"{self._node} is in service; `opsd drain` takes it out", "rma": f"{text}"}
            raise RepairError(known.get(hold, text))
        kind = ownership.kind_of(found.reason)
        fault = FAULTS.get(kind)
        if fault is None:
            raise RepairError(f"no remedy fits {kind}; a person has to look: {found.reason}")
        first = begin_at(fault, found.reason, self._dependencies.machine.recovery_actions())
        return Case(self._file.new_id(now), self._node, kind, found.reason, now, first=first)

    def adopt(self, refusal: Refusal) -> None:
        """Hold the node in opsd's name if Slurm has drained it because opsd's prolog has refused a job.

        Raises SlurmUnavailable while Slurm has not drained it yet, RepairError if opsd may hold no more nodes, and
        SlurmError.
        """
        now, found = self._dependencies.clock(), self._found()
        if found is None or (not found.out_of_service and now - refusal.at >= DRAINED_WITHIN_S):
            return
        if not found.out_of_service:
            raise SlurmUnavailable("this node has refused a job and is not drained yet")
        if not found.reason.startswith(SLURMS_REASON) or abs((found.reason_at or 0.0) - refusal.at) > DRAINED_WITHIN_S:
            return
        told = ownership.reason("preflight", f"{refusal.failures}; Slurm's prolog refused a job", incident="prolog")
        try:
            ownership.take_over(self._dependencies.slurm, self._node, told, self._policy, now=now)
        except ownership.Refused as error:
            raise RepairError(str(error)) from error

    def next(self, case: Case) -> Step:
        """What would be done now. Raises SlurmError."""
        facts, _ = self._look(case.kind)
        return repair_plan.next_step(repair_plan.settled(case, facts, self._settings), facts, self._settings)

    def attend(self, case: Case) -> Case:
        """Take ``case`` to its end, or until the node reboots. Raises CaseError; what Slurm refuses is waited for."""
        told = ""
        while case.end is None:
            facts, found = self._look(case.kind)
            if facts.hold == "ours" and found is not None and found.state == "down" and "drain" not in found.flags:
                self._drain_again(found)
            before, case = case, repair_plan.settled(case, facts, self._settings)
            if case != before:
                self._taken_up(case)
            step = repair_plan.next_step(case, facts, self._settings)
            if facts.hold == "ours" and case.paused != facts.paused:
                case = self._recorded(repair_plan.paused(case, facts))
            if step.do == "wait":
                told = self._wait(step, facts, told)
                continue
            told = ""
            try:
                case = self._do(case, step, facts)
            except SlurmUnavailable as error:
                self._dependencies.say(f"Slurm: {error}")
                self._dependencies.sleep(POLL_S)
                case = self._file.current_of(self._node) or case
        return case

    def _wait(self, step: Step, facts: Facts, told: str) -> str:
        """Wait, and say why if that is not what was ``told`` last; returns what is."""
        if told != step.why:
            self._dependencies.say(f"waiting: {step.why}")
        if facts.busy:
            with suppress(SlurmError):
                if said := self._dependencies.release(self._jobs()):
                    self._dependencies.say(said)
        self._dependencies.sleep(JOBS_POLL_S if facts.busy else POLL_S)
        return step.why

    def _taken_up(self, case: Case) -> None:
        """Record what became of an attempt of an earlier program, and undo what that may have left."""
        last = case.last
        assert last is not None
        self._file.keep(case)
        self._dependencies.say(f"{last.what}: {last.detail}")
        if last.what in (Remedy.RESET, Remedy.RELOAD):
            self._dependencies.machine.restore()

    def _do(self, case: Case, step: Step, facts: Facts) -> Case:
        """Carry out ``step``. Raises SlurmUnavailable, after which it may be repeated."""
        say = self._dependencies.say
        if step.do == "remedy":
            assert step.remedy is not None
            say(f"{step.remedy}: because of {step.why}")
            if case.last is None or case.last.ok is not None:
                case = repair_plan.begun(case, step.remedy, facts)
                if step.remedy is Remedy.REBOOT:  # until Slurm has taken the order, this program may be killed
                    case = repair_plan.noted(case, repair_plan.UNANSWERED)
            else:
                case = repair_plan.repeated(case, facts)
            self._recorded(case)
            return self._climb(case, step.remedy)
        if step.do == "retest":
            say(f"{repair_plan.RETEST}: {case.kind}")
            case = self._recorded(repair_plan.begun(case, repair_plan.RETEST, facts))
            found = self._retest(case.kind)
            return self._ended(case, found.passed, repair_plan.STOPPED * found.stopped + found.detail)
        if step.do == "return":
            return self._return(case, facts)
        if step.do == "rma":
            return self._give_up(case, step.why)
        say(f"left to people: {step.why}")
        end: End = "rma" if facts.hold == "rma" else "left"
        return self._recorded(repair_plan.closed(case, end, step.why, self._dependencies.clock(), case.bundle))

    def _retest(self, kind: str) -> Retested:
        fault, taken = FAULTS.get(kind), partial(self._taken, kind)
        found = self._dependencies.retest(fault.checks if fault else (), taken)
        return (
            self._dependencies.pair(found, fault is not None and fault.of_the_network, taken) if found.passed else found
        )

    def _climb(self, case: Case, remedy: Remedy) -> Case:
        machine = self._dependencies.machine
        try:
            if remedy is Remedy.REBOOT:
                self._reboot(case.reason)
                return self._recorded(repair_plan.noted(case, ""))  # it ends with this boot of the node
            remedies = {Remedy.PROCESSES: machine.end_processes, Remedy.RESET: machine.reset_gpus}
            done = remedies.get(remedy, machine.reload_driver)()
        except SlurmUnavailable:
            raise
        except (RemedyError, SlurmError, OSError) as error:
            return self._ended(case, False, str(error))
        return self._ended(case, True, done)

    def _reboot(self, reason: str) -> None:
        """Raises RemedyError and SlurmError. Without a program Slurm takes the order, and waits for ResumeTimeout."""
        config = self._dependencies.slurm.configuration()
        if config.get("RebootProgram", "") in CONFIGURED_NOT:
            raise RemedyError("Slurm cannot reboot nodes: set RebootProgram in slurm.conf")
        if config.get("ReturnToService") == "2":  # idle, and its reason gone, within seconds of the boot (22.05.8)
            raise RemedyError(
                "after a reboot Slurm would give jobs the node untested: set ReturnToService=1 in slurm.conf"
            )
        found = self._found()
        if found is not None and found.flags >= STUCK:
            raise RemedyError("Slurm reboots it no more: it refuses its registration with less than it should have")
        self._dependencies.slurm.reboot(self._node, reason)

    def _return(self, case: Case, facts: Facts) -> Case:
        if case.last is None or case.last.what != repair_plan.RETURN:
            case = self._recorded(repair_plan.begun(case, repair_plan.RETURN, facts))
        # Before the return: that test is a load, too, and a job may be there within a second.
        said = self._dependencies.as_spare(lambda: self._taken(case.kind)) if facts.hold == "ours" else ""
        proof = self._dependencies.proof()
        checked = {self._node: proof} if proof else {}
        try:
            ownership.give_back(
                self._dependencies.slurm, [self._node], checked, self._policy, now=self._dependencies.clock()
            )
        except SlurmUnavailable:
            raise
        except SlurmError as error:
            return self._ended(case, False, str(error))
        verdict = f"returned after {', '.join(dict.fromkeys(attempt.what for attempt in case.remedies))}"
        self._dependencies.say(f"{verdict}; {said}" if said else verdict)
        now = self._dependencies.clock()
        return self._recorded(repair_plan.closed(repair_plan.ended(case, True, said, now), "returned", verdict, now))

    def _give_up(self, case: Case, why: str) -> Case:
        """Keep the evidence and say in Slurm that the node has to be replaced."""
        bundle = case.bundle or self._dependencies.bundle(case)
        case = self._recorded(replace(case, bundle=bundle))
        told = ownership.reason(case.kind, why, incident=RMA, evidence=bundle)
        try:
            self._dependencies.slurm.update_nodes([self._node], "drain", told)
        except SlurmUnavailable:
            raise
        except SlurmError as error:
            why = f"{why}; Slurm was not told: {error}"
        self._dependencies.say(f"has to be replaced: {why}; evidence: {bundle or 'none could be kept'}")
        return self._recorded(repair_plan.closed(case, "rma", why, self._dependencies.clock(), bundle))

    def _ended(self, case: Case, ok: bool, detail: str) -> Case:
        assert case.last is not None
        took_s = (
            0.0
            if detail.startswith(repair_plan.STOPPED)
            else self._dependencies.machine.uptime_s() - case.last.uptime_s
        )
        after = repair_plan.ended(case, ok, detail, self._dependencies.clock(), took_s)
        assert after.last is not None
        self._dependencies.say(f"{after.last.what}: {'done' if ok else 'failed'}: {detail}")
        return self._recorded(after)

    def _recorded(self, case: Case) -> Case:
        self._file.keep(case)
        return case

    def _look(self, kind: str) -> tuple[Facts, Node | None]:
        """What is known now, and the node as Slurm has it. Changes nothing."""
        now, boot, uptime_s = (
            self._dependencies.clock(),
            self._dependencies.machine.boot(),
            self._dependencies.machine.uptime_s(),
        )
        try:
            found = self._found()
            busy = found is not None and (found.busy or bool(self._jobs()))
            comment = self._dependencies.slurm.comments([self._node]).get(self._node, "")
        except SlurmError:
            return Facts(now, boot, "unknown", uptime_s=uptime_s), None
        hold, text = held_by(found)
        history = node_comment.read(comment)
        relapsed = ownership.relapse_objection(self._node, history, self._policy)
        rebooting = found is not None and bool(found.flags & REBOOTING) and "invalid_reg" not in found.flags
        recent, paused = self._file.recent(self._node, now, history.anew), self._dependencies.paused(kind, now)
        if self._dependencies.by_policy and found is not None and "maintenance" in found.flags:
            paused = paused or "Slurm has it in a reservation for maintenance"
        if found is not None and found.flags & POWER_SAVING:
            paused = paused or SWITCHED_OFF
        settling = uptime_s < SETTLED_S
        return Facts(now, boot, hold, text, busy, rebooting, recent, relapsed, paused, uptime_s, settling), found

    def _taken(self, kind: str) -> str:
        """Why a test that puts load on the node must end: it is somebody else's now. "" if not, or if Slurm is away."""
        facts, _ = self._look(kind)
        if facts.busy:
            return f"a job is on {self._node}"
        if facts.paused == SWITCHED_OFF:
            return SWITCHED_OFF
        texts = {"ours": "", "unknown": "", "nobody": f"{self._node} is in service"}
        return texts.get(facts.hold, facts.hold_text)

    def _drain_again(self, found: Node) -> None:
        """A node that has rebooted is only down, from which Slurm may resume it by itself (ReturnToService)."""
        try:
            self._dependencies.slurm.update_nodes([self._node], "drain", found.reason)
        except SlurmError as error:
            self._dependencies.say(f"Slurm: {error}")

    def _jobs(self) -> list[Job]:
        """The jobs that have this node, suspended ones included."""
        waiting = ("pending", "revoked", "special_exit")
        return [job for job in self._dependencies.slurm.jobs(node=self._node) if job.state not in waiting]

    def _found(self) -> Node | None:
        return next(iter(self._dependencies.slurm.nodes([self._node])), None)


def held_by(node: Node | None) -> tuple[Hold, str]:
    """Who keeps the node out of service, and a sentence if that is not opsd's repair."""
    if node is None:
        return "others", "Slurm has no such node; if this machine has another name there, set agent.node"
    if not node.out_of_service and not node.flags & REBOOTING:
        return "nobody", ""
    if foreign := drain.foreign_hold(node):
        return "others", foreign
    if node.reason.startswith(f"{drain.OWN_PREFIX}{RMA} "):
        return "rma", f"{node.name} waits for its replacement: {node.reason}"
    return "ours", ""
