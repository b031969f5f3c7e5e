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
from opsd.launch.blame import Blame
from opsd.launch.failure import Failure, RestartPolicy
from opsd.launch.formation import Formation
from opsd.launch.hang import Hang
from opsd.launch.hang_watch import hang_fields
from opsd.launch.inquest import HangInquiry, Inquest
from opsd.launch.loop import Loop
from opsd.launch.messages import say
from opsd.launch.placement import Shape, generation_of
from opsd.launch.postmortem import PROGRAM_NOT_FOUND, explain
from opsd.launch.quorum.port import Member, Message, Plan, Quorum
from opsd.launch.reports import BadReport, Report, failed_from_json, standings_from_json
from opsd.launch.run_log import RunLog

SWAP = "the swap of "
"""How the reason of a stop begins after which the run goes on without a node."""


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
        self._blame = Blame()
        self._unready: dict[str, str] = {}
        self._inquest = Inquest(loop, shape.victim_s, self._judge)
        self._hangs = HangInquiry(loop, self._ask_standings, self._hung)
        self._first_rank: dict[str, int] = {}
        self._restarts = 0
        self._gone: set[str] = set()
        self._furthest: int | None = None
        self._committed: int | None = None
        self._ended: dict[str, str] = {}
        self._stopping = ""
        self._finished = False
        self._noticed = time.monotonic()

    def take_over(self, plan: Plan | None, answers: Mapping[str, Message]) -> None:
        """This launcher is head from now on; ``plan`` is the newest valid one, with what its members answered."""
        if plan is None:
            self._formation.form()
            return
        self._policy.recall(plan.payload["policy"])
        self._restarts = int(plan.payload["restarts"])
        self._blame.recall(plan.payload)
        self._formation.take_over(plan)
        self._know(plan, answers)

    # -- nodes ---------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """Another launcher is there."""
        self._gone.discard(member.name)
        self._unready.pop(member.name, None)
        if self._formation.waiting:
            self._renew()
        elif self._formation.plan is not None:
            self._log.emit("launcher_joined", joined=member.name)
            self._formation.keep_soon()

    def lost(self, name: str, silent_s: float) -> None:
        """A launcher is gone, and with it, as far as anybody can tell, its node."""
        if self._finished:
            return
        self._gone.add(name)
        at_work = name in self._formation.slots
        self._log.emit("node_lost", lost=name, silent_s=round(silent_s, 3), ranks=at_work)
        say(f"node {name} is lost: nothing heard of it for {silent_s:.1f} s")
        if self._formation.changing:
            self._renew()
        elif not at_work:
            self._formation.keep_soon()
        elif not self._formation.waiting:
            rank = self._first_rank.get(name, 0)
            cause = Failure(rank, f"the loss of node {name}", "hardware", time.time(), self._furthest)
            self._noticed = time.monotonic() - silent_s
            self._recover(Report(name, cause, "not within reach", ""))

    def claim_refused(self) -> None:
        """The number of the proposal is taken: propose the same with another."""
        self._renew()

    def overtaken(self) -> None:
        """Another copy of the run has begun: what the ranks here did from now on could not be saved."""
        if not self._finished:
            self._end(exitcodes.FENCED, "another copy of this run has begun in its folder; this one stops")

    @property
    def unfit(self) -> set[str]:
        """The nodes that are to run no ranks."""
        return self._blame.unfit | self._unready.keys()

    def payload(self, keep: int) -> dict[str, Any]:
        """What the plan tells a successor, and the launchers of what was before."""
        return {
            "policy": self._policy.memory(),
            "restarts": self._restarts,
            **self._blame.memory(),
            "noticed_s": time.monotonic() - self._noticed,
            "first": self._formation.plan is None,
            "keep": keep,
        }

    def too_few(self, reason: str) -> None:
        """Give up here: before the first generation for good, later for Slurm to find other nodes."""
        self._end(exitcodes.FAILED if self._formation.plan is None else exitcodes.REQUEUE, reason)

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
            self._stop(str(message["by"]))
        elif kind == "readiness":
            self._note_readiness(sender, str(message["why"]))
        elif plan is None or self._formation.changing or message.get("generation") != generation_of(plan):
            return
        elif kind == "failed":
            self._inquest.add(failed_from_json(sender, message["failures"], time.time()))
        elif kind == "hung":
            if not self._inquest.open:
                self._hangs.begin(set(plan.slots) - self._ended.keys())
        elif kind == "standings":
            ranks = standings_from_json(message["ranks"], time.monotonic())
            self._hangs.add(sender, ranks, None if message["stacks"] is None else str(message["stacks"]))
        elif kind == "ended":
            self._ended[sender] = str(message["told"])
            self._all_ended()
        elif kind == "waiting":
            say(f"the ranks of {sender} no longer run; restarting all ranks")
            self._restart_all()
        elif kind == "late":
            self._too_slow(str(message["told"]), str(message["reason"]))
        elif kind == "restart":
            self._restart_on_request(str(message["reason"]))
        elif kind == "swap":
            self._swap(str(message["node"]), str(message["reason"]))
        elif kind == "leaving":
            self._let_go(sender, str(message["reason"]))
        elif kind == "spare_wanted":
            self._log.emit("spare_wanted", swap=str(message["node"]), reason=str(message["reason"]))
        else:
            raise BadReport(f"{kind!r} is not a message that this version knows")

    def _note_readiness(self, node: str, why: str) -> None:
        """Use a spare only while it says that it may be."""
        known = self._unready.pop(node, "")
        if why:
            self._unready[node] = why
        if why != known:
            if why:
                self._log.emit("spare_refused", refused=node, reason=why)
            if self._formation.changing or self._formation.waiting:
                self._renew()

    def _renew(self) -> None:
        """Propose the next generation. Who was to go, and is still there, stays if nobody can take its place."""
        leaving = (self._blame.unfit & set(self._formation.slots)) - self._gone
        if not self._formation.spares:
            self._blame.unfit -= leaving
            for node in sorted(leaving):
                self._log.emit("swap_refused", swap=node, reason="there is no spare for it")
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
            self._end(exitcodes.NOT_FOUND, f"{cause.error.message} (on {report.node})")
        else:
            self._recover(report)

    def _recover(self, report: Report, *, named: bool = True) -> None:
        """Restart all ranks; the node of the report is not to blame if it was not ``named``."""
        cause = report.failure
        if self._stopping and not self._swapping:
            code = exitcodes.REQUEUE if report.node in self._gone else exitcodes.FAILED
            self._end(code, f"rank {cause.rank} on {report.node} failed while the run was stopping: {cause.cause}")
            return
        verdict = self._policy.judge(cause, furthest=self._furthest, committed=self._committed)
        if verdict is not None:
            self._end(verdict.code, explain(verdict, cause, report.node, report.log, report.tail))
            return
        say(f"rank {cause.rank} on {report.node} failed with {cause.cause}; restarting all ranks")
        self._restarts += 1
        if named:
            self._judge_node(report.node, cause)
        self._renew()

    def _judge_node(self, node: str, cause: Failure) -> None:
        """Let a spare take the place of a node that is still there, and has proven unfit."""
        reason = "" if node in self._gone else self._blame.charge(node, cause)
        if reason:
            self._retire(node, reason)

    def _retire(self, node: str, reason: str) -> bool:
        """Have ``node`` run no more ranks if another can take its place."""
        if not self._formation.spares:
            return False
        self._blame.unfit.add(node)
        self._log.emit("node_retired", retired=node, reason=reason)
        return True

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

    # -- requests ------------------------------------------------------------------------------------------------

    def _restart_on_request(self, reason: str) -> None:
        if not self._stopping:
            self._log.emit("restart_requested", reason=reason)
            self._restart_all()

    def _restart_all(self) -> None:
        self._noticed = time.monotonic()
        self._restarts += 1
        self._renew()

    def _swap(self, node: str, reason: str) -> None:
        """Checkpoint at a step boundary, then go on without ``node``: no step is lost."""
        if self._stopping or node not in self._formation.slots:
            return
        if not self._retire(node, reason):
            self._log.emit("swap_refused", swap=node, reason="there is no spare for it")
            return
        self._stop_for_swap(node, reason)

    def _let_go(self, node: str, reason: str) -> None:
        """The same for a guest that has to leave, and may come again; without a spare one is asked for."""
        if self._stopping or node not in self._formation.slots:
            return
        if not self._formation.spares:
            self._log.emit("spare_wanted", swap=node, reason=reason)
            return
        self._unready[node] = reason
        self._stop_for_swap(node, reason)

    def _stop_for_swap(self, node: str, reason: str) -> None:
        self._log.emit("restart_requested", reason=f"{SWAP}{node}: {reason}", swap=node)
        self._noticed = time.monotonic()
        self._stopping = f"{SWAP}{node}"
        self._quorum.tell_all({"kind": "order_stop", "by": self._stopping})

    @property
    def _swapping(self) -> bool:
        return self._stopping.startswith(SWAP)

    def _stop(self, by: str) -> None:
        if self._stopping and not self._swapping:
            return
        self._stopping = by
        if self._formation.plan is None or self._formation.changing or self._formation.waiting:
            self._end(exitcodes.REQUEUE, f"stopped between generations after {by}")
        else:
            self._quorum.tell_all({"kind": "order_stop", "by": by})

    def _all_ended(self) -> None:
        """Go on once every node's ranks have ended, in order or as they were told to, by a head before this one too."""
        if not self._ended.keys() >= set(self._formation.slots):
            return
        by = self._stopping or next(filter(None, self._ended.values()), "")
        if by.startswith(SWAP):
            self._renew()
        elif by:
            self._log.emit("requeued", signal=by, step=self._furthest)
            self._end(exitcodes.REQUEUE, f"stopped in good order after {by}")
        else:
            self._end(exitcodes.OK, "all ranks finished")

    def _too_slow(self, told: str, reason: str) -> None:
        """Ranks did not stop in time: a swap then costs the steps since the last checkpoint, and a stop the run."""
        if (self._stopping or told).startswith(SWAP):
            say(f"{reason}; restarting all ranks")
            self._restart_all()
        else:
            self._end(exitcodes.FAILED, reason)

    def replaced(self) -> None:
        """Forget what was known of the generation that ends."""
        self._inquest.forget()
        self._hangs.forget()
        self._ended = {}
        self._stopping = ""

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self, code: int, reason: str) -> None:
        self._finished = True
        self.retire()
        self._log.emit("finished", exit_code=code, reason=reason)
        self._over(tuple(sorted(self._gone)), tuple(sorted(self._blame.unfit - self._gone)))
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
