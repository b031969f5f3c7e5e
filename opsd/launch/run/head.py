"""Decides about a run on several nodes, in the launcher that its fellows have elected.

The head keeps nothing that a successor could not have: what it decided lies in the plan of the generation, what happens
on the nodes is told again to whoever becomes head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from opsd import exitcodes
from opsd.launch.hangs.hang import Hang
from opsd.launch.hangs.hang_watch import hang_fields
from opsd.launch.io.loop import Loop
from opsd.launch.io.member import Member, Message
from opsd.launch.io.messages import say
from opsd.launch.io.run_log import RunLog
from opsd.launch.quorum.port import Plan, Quorum
from opsd.launch.ranks.failure import Failure, RestartPolicy
from opsd.launch.ranks.postmortem import PROGRAM_NOT_FOUND, explain
from opsd.launch.run.formation import Formation
from opsd.launch.run.inquest import HangInquiry, Inquest
from opsd.launch.run.placement import Shape, generation_of
from opsd.launch.run.reports import BadReport, Report, failed_from_json, standings_from_json
from opsd.launch.run.roster import Roster
from opsd.launch.run.stops import Stops


class Head:
    """Makes the plans. ``over`` is called with lost and with unfit nodes before the launchers are told to end."""

    def __init__(
        self,
        shape: Shape,
        quorum: Quorum,
        loop: Loop,
        policy: RestartPolicy,
        log: RunLog,
        over: Callable[[tuple[str, ...], tuple[str, ...]], None],
    ) -> None:
        self._quorum = quorum
        self._policy = policy
        self._log = log
        self._over = over
        self._formation = Formation(shape, quorum, loop, self)
        self._roster = Roster(log, lambda: self._formation.spares)
        self._stops = Stops(self._formation, quorum, self._roster, log, self)
        self._inquest = Inquest(loop, shape.victim_s, self._judge)
        self._hangs = HangInquiry(loop, self._ask_standings, self._hung)
        self._first_rank: dict[str, int] = {}
        self._restarts = 0
        self._furthest: int | None = None
        self._committed: int | None = None
        self._finished = False
        self._noticed = time.monotonic()

    def take_over(self, plan: Plan | None, answers: Mapping[str, Message]) -> None:
        """This launcher is head from now on; ``plan`` is the newest valid one, with what its members answered."""
        if plan is None:
            self._formation.form()
            return
        self._policy.recall(plan.payload["policy"])
        self._restarts = int(plan.payload["restarts"])
        self._roster.recall(plan.payload)
        self._formation.take_over(plan)
        self._know(plan, answers)

    # -- nodes ---------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """Another launcher is there."""
        self._roster.came(member.name)
        if self._formation.waiting:
            self.renew()
        elif self._formation.plan is not None:
            self._log.emit("launcher_joined", joined=member.name)
            self._formation.keep_soon()

    def lost(self, name: str, silent_s: float) -> None:
        """A launcher is gone, and with it, as far as anybody can tell, its node."""
        if self._finished:
            return
        self._roster.gone.add(name)
        at_work = name in self._formation.slots
        self._log.emit("node_lost", lost=name, silent_s=round(silent_s, 3), ranks=at_work)
        say(f"node {name} is lost: nothing heard of it for {silent_s:.1f} s")
        if self._formation.changing:
            self.renew()
        elif not at_work:
            self._formation.keep_soon()
        elif not self._formation.waiting:
            rank = self._first_rank.get(name, 0)
            cause = Failure(rank, f"the loss of node {name}", "hardware", time.time(), self._furthest)
            self._noticed = time.monotonic() - silent_s
            self._recover(Report(name, cause, "not within reach", ""))

    def claim_refused(self) -> None:
        """The number of the proposal is taken: propose the same with another."""
        self.renew()

    def overtaken(self) -> None:
        """Another copy of the run has begun: what the ranks here did from now on could not be saved."""
        if not self._finished:
            self.end(exitcodes.FENCED, "another copy of this run has begun in its folder; this one stops")

    @property
    def unfit(self) -> set[str]:
        """The nodes that are to run no ranks."""
        return self._roster.unfit

    def payload(self, keep: int) -> dict[str, Any]:
        """What the plan tells a successor, and the launchers of what was before."""
        return {
            "policy": self._policy.memory(),
            "restarts": self._restarts,
            **self._roster.memory(),
            "noticed_s": time.monotonic() - self._noticed,
            "first": self._formation.plan is None,
            "keep": keep,
        }

    def too_few(self, reason: str) -> None:
        """Give up here: before the first generation for good, later for Slurm to find other nodes."""
        self.end(exitcodes.FAILED if self._formation.plan is None else exitcodes.REQUEUE, reason)

    def began(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        """``plan`` is valid; ``answers`` say how many ranks each node has and how far the run is."""
        before = self._formation.slots
        self._formation.begun(plan)
        self._know(plan, answers)
        if plan.payload["keep"]:
            return
        for name in plan.slots:
            if before and name not in before:
                self._log.emit("spare_joined", joined=name, place=plan.slots.index(name))
        size = sum(int(answers[name]["local_size"]) for name in plan.slots)
        self._log.emit("generation_started", world_size=size, nodes=list(plan.slots), spares=list(plan.spares))

    def _know(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        self._log.generation = generation_of(plan)
        sizes = [int(answers[name]["local_size"]) for name in plan.slots]
        self._first_rank = {name: sum(sizes[:place]) for place, name in enumerate(plan.slots)}
        for answer in answers.values():
            self._note_progress(answer)

    # -- messages ------------------------------------------------------------------------------------------------

    def received(self, sender: str, message: Message) -> None:
        """Something has happened on a node, or somebody there wants something."""
        kind, plan = message.get("kind"), self._formation.plan
        self._note_progress(message)
        if kind == "event":
            self._log.relay(message["record"], float(message["age_s"]))
        elif self._finished or kind == "progress":
            return
        elif kind == "stop":
            self._stops.stop(str(message["by"]))
        elif kind == "readiness":
            self._note_readiness(sender, str(message["why"]))
        elif plan is None or self._formation.changing or message.get("generation") != generation_of(plan):
            return
        elif kind == "failed":
            self._inquest.add(failed_from_json(sender, message["failures"], time.time()))
        elif kind == "hung":
            if not self._inquest.open:
                self._hangs.begin(self._stops.at_work)
        elif kind == "standings":
            ranks = standings_from_json(message["ranks"], time.monotonic())
            self._hangs.add(sender, ranks, None if message["stacks"] is None else str(message["stacks"]))
        elif kind == "ended":
            self._stops.ended(sender, str(message["told"]))
        elif kind == "waiting":
            gone_s = float(message["gone_s"])
            say(f"the ranks of {sender} no longer run; restarting all ranks")
            self._log.emit("ranks_gone", gone_s, gone=sender, gone_s=round(gone_s, 3))
            self.restart_all()
        elif kind == "late":
            self._stops.too_slow(str(message["told"]), str(message["reason"]))
        elif kind == "restart":
            self._stops.restart(str(message["reason"]))
        elif kind == "swap":
            self._stops.swap(str(message["node"]), str(message["reason"]))
        elif kind == "leaving":
            self._stops.let_go(sender, str(message["reason"]))
        elif kind == "spare_wanted":
            self._log.emit("spare_wanted", swap=str(message["node"]), reason=str(message["reason"]))
        else:
            raise BadReport(f"{kind!r} is not a message that this version knows")

    def _note_readiness(self, node: str, why: str) -> None:
        changed = self._roster.note_readiness(node, why)
        if changed and (self._formation.changing or self._formation.waiting):
            self.renew()

    def renew(self) -> None:
        """Propose the next generation."""
        self._roster.keep(self._formation.slots)
        self._formation.renew()

    def _note_progress(self, message: Mapping[str, Any]) -> None:
        self._furthest = later(self._furthest, message.get("furthest"))
        self._committed = later(self._committed, message.get("committed"))

    # -- failures ------------------------------------------------------------------------------------------------

    def _judge(self, report: Report) -> None:
        """The first cause of what has failed is known."""
        cause = report.failure
        self._noticed = self._inquest.noticed
        if cause.error is not None and cause.error.type == PROGRAM_NOT_FOUND:
            self.end(exitcodes.NOT_FOUND, f"{cause.error.message} (on {report.node})")
        else:
            self._recover(report)

    def _recover(self, report: Report, *, named: bool = True) -> None:
        """Restart all ranks; the node of the report is not to blame if it was not ``named``."""
        cause = report.failure
        if self._stops.for_good:
            code = exitcodes.REQUEUE if report.node in self._roster.gone else exitcodes.FAILED
            self.end(code, f"rank {cause.rank} on {report.node} failed while the run was stopping: {cause.cause}")
            return
        verdict = self._policy.judge(cause, furthest=self._furthest, committed=self._committed)
        if verdict is not None:
            self.end(verdict.code, explain(verdict, cause, report.node, report.log, report.tail))
            return
        say(f"rank {cause.rank} on {report.node} failed with {cause.cause}; restarting all ranks")
        self._restarts += 1
        if named:
            self._roster.judge(report.node, cause)
        self.renew()

    def _ask_standings(self) -> None:
        self._quorum.tell_all({"kind": "standings?", "generation": self._log.generation})

    def _hung(self, hang: Hang, stacks: Mapping[str, str | None]) -> None:
        rank = hang.rank if hang.rank is not None else 0
        node = max((first, name) for name, first in self._first_rank.items() if first <= rank)[1]
        fields = hang_fields(replace(hang, stacks=stacks.get(node)))
        self._log.emit("hang_detected", **fields, culprit_node=None if hang.rank is None else node)
        self._quorum.tell_all({"kind": "hang", "fields": fields, "score": hang.score})
        cause = Failure(rank, f"a hang in {hang.phase}", "hang", time.time(), hang.step, hang.phase, detail=hang.reason)
        self._noticed = time.monotonic()
        self._recover(Report(node, cause, "not within reach", ""), named=hang.rank is not None)

    # -- what requests lead to -----------------------------------------------------------------------------------

    def note_interruption(self) -> None:
        """From now on the run stands still."""
        self._noticed = time.monotonic()

    def restart_all(self) -> None:
        """Begin the next generation at once, from the last checkpoint."""
        self.note_interruption()
        self._restarts += 1
        self.renew()

    def stopped(self, by: str) -> None:
        """The ranks have ended in order, as ``by`` wanted: the job goes back into the queue."""
        self._log.emit("requeued", signal=by, step=self._furthest)
        self.end(exitcodes.REQUEUE, f"stopped in good order after {by}")

    def replaced(self) -> None:
        """Forget what was known of the generation that ends."""
        self._inquest.forget()
        self._hangs.forget()
        self._stops.forget()

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, code: int, reason: str) -> None:
        """Have all launchers exit with ``code``."""
        self._finished = True
        self.retire()
        self._log.emit("finished", exit_code=code, reason=reason)
        self._over(tuple(sorted(self._roster.gone)), tuple(sorted(self._roster.retired)))
        self._quorum.tell_all({"kind": "finish", "code": code, "reason": reason})

    def retire(self) -> None:
        """Decide nothing more: another launcher is head now, or the run is over."""
        self.replaced()
        self._formation.close()


def later(known: int | None, step: object) -> int | None:
    """The higher of a step that is known and one that is reported, if it is one."""
    if not isinstance(step, int):
        return known
    return step if known is None else max(known, step)
