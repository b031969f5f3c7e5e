"""Decides about a run on several nodes, in the launcher that its fellows have elected.

The head keeps nothing that a successor could not have: what it decided lies in the plan of the generation, what happens
on the nodes is told again to whoever becomes head.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opsd import exitcodes
from opsd.launch.failure import Failure, RestartPolicy
from opsd.launch.hang import Hang
from opsd.launch.hang_watch import hang_fields
from opsd.launch.inquest import HangInquiry, Inquest
from opsd.launch.loop import Loop, Timer
from opsd.launch.messages import say
from opsd.launch.placement import Shape, generation_of, place
from opsd.launch.postmortem import PROGRAM_NOT_FOUND, explain
from opsd.launch.quorum.port import Member, Message, Plan, Quorum
from opsd.launch.reports import BadReport, Report, failed_from_json, standings_from_json
from opsd.launch.run_log import RunLog

FORM_SETTLE_S = 2.0
"""Once the nodes that are needed have come: how long the first generation waits for the others that are expected."""
REGROUP_S = 2.0
"""How long a new head waits for the others to find it before it says that there are too few."""
KEEP_S = 0.5
"""After a spare has come or gone: how long others may follow before the members are agreed on anew."""
SWAP = "the swap of "
"""How the reason of a stop begins after which the run goes on without a node."""
_BLAMED_OFTEN = 2


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
        self._shape = shape
        self._quorum = quorum
        self._loop = loop
        self._policy = policy
        self._log = log
        self._over = over
        self._plan: Plan | None = None
        self._first_rank: dict[str, int] = {}
        self._proposed: int | None = None
        self._keeping = False
        self._regroup_until = 0.0
        self._restarts = 0
        self._unfit: set[str] = set()
        self._gone: set[str] = set()
        self._furthest: int | None = None
        self._committed: int | None = None
        self._inquest = Inquest(loop, shape.victim_s, self._judge)
        self._hangs = HangInquiry(loop, self._ask_standings, self._hung)
        self._ended: dict[str, str] = {}
        self._stopping = ""
        self._swapping = False
        self._blamed: Counter[str] = Counter()
        self._waiting: Timer | None = None
        self._finished = False
        self._noticed = time.monotonic()

    def take_over(self, plan: Plan | None, answers: Mapping[str, Message]) -> None:
        """This launcher is head from now on; ``plan`` is the newest valid one, with what its members answered."""
        if plan is None:
            self._wait_for_nodes("not enough launchers have come", self._shape.join_s)
            self._try()
            return
        self._policy.recall(plan.payload["policy"])
        self._restarts = int(plan.payload["restarts"])
        self._unfit = set(plan.payload["unfit"])
        self._blamed = Counter(plan.payload["blamed"])
        self._regroup_until = time.monotonic() + REGROUP_S
        self._know(plan, answers)
        self._keep_soon()

    # -- nodes ---------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """Another launcher is there."""
        self._gone.discard(member.name)
        if self._waiting is not None:
            self._try()
        elif self._plan is not None:
            self._log.emit("launcher_joined", joined=member.name)
            self._keep_soon()

    def lost(self, name: str, silent_s: float) -> None:
        """A launcher is gone, and with it, as far as anybody can tell, its node."""
        if self._finished:
            return
        self._gone.add(name)
        plan = self._plan
        at_work = plan is not None and name in plan.slots
        self._log.emit("node_lost", lost=name, silent_s=round(silent_s, 3), ranks=at_work)
        say(f"node {name} is lost: nothing heard of it for {silent_s:.1f} s")
        if self._proposed is not None and not (self._keeping and not at_work):
            self._try()
        elif not at_work:
            self._keep_soon()
        elif self._waiting is None:
            rank = self._first_rank.get(name, 0)
            cause = Failure(rank, f"the loss of node {name}", "hardware", time.time(), self._furthest)
            self._noticed = time.monotonic() - silent_s
            self._recover(Report(name, cause, "not within reach", ""))

    def claim_refused(self) -> None:
        """The number of the proposal is taken: propose the same with another."""
        self._try()

    def _keep_soon(self) -> None:
        """Have those that have come vote, and those that have gone no longer count, while the ranks run on."""
        self._loop.later(KEEP_S, self._keep)

    def _keep(self) -> None:
        plan = self._plan
        if plan is None or self._finished or self._waiting is not None:
            return
        if self._proposed is not None and not self._keeping:
            return
        if {member.name for member in plan.members} != self._quorum.alive.keys() and self._all_alive(plan.slots):
            self._keeping = True
            self._proposed = self._quorum.propose(plan.slots, self._payload(keep=generation_of(plan)))

    def _all_alive(self, slots: Sequence[str]) -> bool:
        return self._quorum.alive.keys() >= set(slots)

    def _payload(self, keep: int) -> dict[str, Any]:
        return {
            "policy": self._policy.memory(),
            "restarts": self._restarts,
            "unfit": sorted(self._unfit),
            "blamed": self._blamed,
            "noticed_s": time.monotonic() - self._noticed,
            "first": self._plan is None,
            "keep": keep,
        }

    def _try(self) -> None:
        """Propose the next generation if there are enough nodes for it."""
        slots = self._slots()
        if slots is None:
            self._proposed = None
            if self._waiting is None:
                wait_s = max(self._shape.wait_s, self._regroup_until - time.monotonic(), 0.0)
                self._wait_for_nodes("too few nodes are left", wait_s)
            return
        everybody = self._quorum.alive.keys() >= set(self._shape.order)
        if self._plan is None and not everybody and self._waiting is not None:
            self._loop.later(FORM_SETTLE_S, self._propose_if_waiting)
            return
        self._propose(slots)

    def _propose_if_waiting(self) -> None:
        slots = self._slots()
        if self._waiting is not None and slots is not None:
            self._propose(slots)

    def _propose(self, slots: tuple[str, ...]) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        self._forget()
        self._keeping = False
        self._proposed = self._quorum.propose(slots, self._payload(keep=0))

    def _slots(self) -> tuple[str, ...] | None:
        before = self._plan.slots if self._plan is not None else ()
        return place(self._shape, before, self._quorum.alive.keys(), self._unfit)

    def _wait_for_nodes(self, reason: str, wait_s: float) -> None:
        if self._plan is not None and wait_s > 0:
            say(f"{reason}; waiting up to {wait_s:g} s for another")
        self._waiting = self._loop.later(wait_s, lambda: self._too_few(reason))

    def _too_few(self, reason: str) -> None:
        self._waiting = None
        code = exitcodes.FAILED if self._plan is None else exitcodes.REQUEUE
        self._end(code, f"{reason}: {len(self._quorum.alive)} are there, {self._shape.least} are needed")

    def began(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        """``plan`` is valid; ``answers`` say how many ranks each node has and how far the run is."""
        before = self._plan
        self._proposed, self._keeping = None, False
        self._know(plan, answers)
        self._keep_soon()
        if plan.payload["keep"]:
            return
        for name in plan.slots:
            if before is not None and name not in before.slots:
                self._log.emit("spare_joined", joined=name, place=plan.slots.index(name))
        size = sum(int(answers[name]["local_size"]) for name in plan.slots)
        self._log.emit("generation_started", world_size=size, nodes=list(plan.slots), spares=list(plan.spares))

    def _know(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        self._plan = plan
        self._log.generation = generation_of(plan)
        sizes = [int(answers[name]["local_size"]) for name in plan.slots]
        self._first_rank = {name: sum(sizes[:place]) for place, name in enumerate(plan.slots)}
        for answer in answers.values():
            self._note_progress(answer)

    # -- messages ------------------------------------------------------------------------------------------------

    def received(self, sender: str, message: Message) -> None:
        """Something has happened on a node, or somebody there wants something."""
        kind = message.get("kind")
        self._note_progress(message)
        if kind == "event":
            self._log.relay(message["record"], float(message["age_s"]))
        elif self._finished or kind == "progress":
            return
        elif kind == "stop":
            self._stop(str(message["by"]))
        elif (
            self._plan is None
            or (self._proposed is not None and not self._keeping)
            or message.get("generation") != generation_of(self._plan)
        ):
            return
        elif kind == "failed":
            self._inquest.add(failed_from_json(sender, message["failures"], time.time()))
        elif kind == "hung":
            if not self._inquest.open:
                self._hangs.begin(self._plan.slots)
        elif kind == "standings":
            self._hangs.add(sender, standings_from_json(message["ranks"], time.monotonic()))
        elif kind == "ended":
            self._ended[sender] = str(message["told"])
            self._all_ended()
        elif kind == "waiting":
            self._try()
        elif kind == "late":
            self._end(exitcodes.FAILED, str(message["reason"]))
        elif kind == "restart":
            self._restart_on_request(str(message["reason"]))
        elif kind == "swap":
            self._swap(str(message["node"]), str(message["reason"]))
        else:
            raise BadReport(f"{kind!r} is not a message that this version knows")

    def _note_progress(self, message: Mapping[str, Any]) -> None:
        for name in ("furthest", "committed"):
            step = message.get(name)
            if isinstance(step, int):
                known = self._furthest if name == "furthest" else self._committed
                setattr(self, f"_{name}", step if known is None else max(step, known))

    # -- failures ------------------------------------------------------------------------------------------------

    def _judge(self, report: Report) -> None:
        """The first cause of what has failed is known."""
        cause = report.failure
        self._noticed = self._inquest.noticed
        if cause.error is not None and cause.error.type == PROGRAM_NOT_FOUND:
            self._end(exitcodes.NOT_FOUND, f"{cause.error.message} (on {report.node})")
        else:
            self._recover(report)

    def _recover(self, report: Report) -> None:
        cause = report.failure
        if self._stopping and not self._swapping:
            lost = cause.exit.startswith("the loss of node")
            code = exitcodes.REQUEUE if lost else exitcodes.FAILED
            self._end(code, f"rank {cause.rank} on {report.node} failed while the run was stopping: {cause.cause}")
            return
        verdict = self._policy.judge(cause, furthest=self._furthest, committed=self._committed)
        if verdict is not None:
            self._end(verdict.code, explain(verdict, cause, report.node, report.log, report.tail))
            return
        say(f"rank {cause.rank} on {report.node} failed with {cause.cause}; restarting all ranks")
        self._restarts += 1
        self._judge_node(report.node, cause)
        self._try()

    def _judge_node(self, node: str, cause: Failure) -> None:
        """Let a spare take the place of a node whose hardware has failed, or that was at fault twice."""
        if cause.kind not in ("hardware", "signal", "hang") or node in self._gone:
            return
        self._blamed[node] += 1
        if cause.kind == "hardware" or self._blamed[node] >= _BLAMED_OFTEN:
            self._retire(node, f"{cause.cause}, fault number {self._blamed[node]} of this node")

    def _retire(self, node: str, reason: str) -> bool:
        """Have ``node`` run no more ranks if another can take its place."""
        spares = self._quorum.alive.keys() - self._unfit - set(self._plan.slots if self._plan is not None else ())
        if spares:
            self._unfit.add(node)
            self._log.emit("node_retired", retired=node, reason=reason)
        return bool(spares)

    def _ask_standings(self) -> None:
        assert self._plan is not None
        self._quorum.tell_all({"kind": "standings?", "generation": generation_of(self._plan)})

    def _hung(self, hang: Hang) -> None:
        rank = hang.rank if hang.rank is not None else 0
        node = max((first, name) for name, first in self._first_rank.items() if first <= rank)[1]
        fields = hang_fields(hang)
        self._log.emit("hang_detected", **fields, culprit_node=None if hang.rank is None else node)
        self._quorum.tell_all({"kind": "hang", "fields": fields, "score": hang.score})
        cause = Failure(rank, f"a hang in {hang.phase}", "hang", time.time(), hang.step, hang.phase, detail=hang.reason)
        self._noticed = time.monotonic()
        self._recover(Report(node, cause, "not within reach", ""))

    # -- requests ------------------------------------------------------------------------------------------------

    def _restart_on_request(self, reason: str) -> None:
        if not self._stopping:
            self._log.emit("restart_requested", reason=reason)
            self._noticed = time.monotonic()
            self._restarts += 1
            self._try()

    def _swap(self, node: str, reason: str) -> None:
        """Checkpoint at a step boundary, then go on without ``node``: no step is lost."""
        assert self._plan is not None
        if self._stopping or node not in self._plan.slots:
            return
        if not self._retire(node, reason):
            self._log.emit("swap_refused", swap=node, reason="there is no spare for it")
            return
        self._log.emit("restart_requested", reason=f"{SWAP}{node}: {reason}", swap=node)
        self._noticed = time.monotonic()
        self._stopping, self._swapping = f"{SWAP}{node}", True
        self._quorum.tell_all({"kind": "order_stop", "by": self._stopping})

    def _stop(self, by: str) -> None:
        if self._stopping and not self._swapping:
            return
        self._stopping, self._swapping = by, False
        if self._plan is None or (self._proposed is not None and not self._keeping):
            self._end(exitcodes.REQUEUE, f"stopped between generations after {by}")
        else:
            self._quorum.tell_all({"kind": "order_stop", "by": by})

    def _all_ended(self) -> None:
        """Go on once every node's ranks have ended, in order or as they were told to, by a head before this one too."""
        assert self._plan is not None
        if not self._ended.keys() >= set(self._plan.slots):
            return
        by = self._stopping or next(filter(None, self._ended.values()), "")
        if by.startswith(SWAP):
            self._try()
        elif by:
            self._log.emit("requeued", signal=by, step=self._furthest)
            self._end(exitcodes.REQUEUE, f"stopped in good order after {by}")
        else:
            self._end(exitcodes.OK, "all ranks finished")

    def _forget(self) -> None:
        """What was known of the generation that ends."""
        self._inquest.forget()
        self._hangs.forget()
        self._ended = {}
        self._stopping, self._swapping = "", False

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self, code: int, reason: str) -> None:
        self._forget()
        self._finished = True
        self._log.emit("finished", exit_code=code, reason=reason)
        self._over(tuple(sorted(self._gone)), tuple(sorted(self._unfit - self._gone)))
        self._quorum.tell_all({"kind": "finish", "code": code, "reason": reason})

    def retire(self) -> None:
        """Another launcher is head now."""
        self._forget()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
