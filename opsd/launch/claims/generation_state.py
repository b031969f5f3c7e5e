"""The life of a generation as one launcher sees it: proposed, claimed, prepared, begun, and led.

The store decides which claim holds. A launcher follows the maker of the newest claim. While that leader is silent an
election picks the launcher that claims the next generation; the others obey the claim.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, ParamSpec

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import TELLING_S, ClaimStore, ClaimWriter, Plan, StorePoller, StoreRead, listening
from opsd.launch.claims.election import Election
from opsd.launch.claims.messages import Begun, Claimed, GroupListener, Heartbeat, Message, Ready
from opsd.launch.claims.peers import FollowerTracker, LeaderClient
from opsd.launch.io.protocol import Member
from opsd.slurm.run_owner import is_older

TIMEOUT_S = 1.5
Phase = Literal["starting", "electing", "claiming", "leading", "following", "over"]
"""Before the first read; no leader; elected; leading; following; done: the run has ended or goes on elsewhere."""
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class Deferred:
    """An action that waits until ``read`` shows that generation ``number`` is the newest.

    Ready: report that this node is ready. Begun: begin. None: learn that the generation began without this process.
    """

    read: int
    number: int
    what: Ready | Begun | None


class GenerationState:
    """``send`` may lose messages; ``expected`` are the launchers of a run that has not begun, this one included.

    ``launcher`` identifies this process, ``start`` is common to all launchers of one start of the run, ``size`` is the
    number of ranks on this node. ``wake`` schedules a call of ``flush``. ``once``: no later attempt has the same
    ``start``, so an end of the run that is found at startup is final. A claim of another start that is newer than
    ``replaces`` has another owner; None replaces any.
    """

    def __init__(
        self,
        own: Member,
        expected: Sequence[Member],
        send: Callable[[Member, Message], None],
        folder: ClaimStore,
        wake: Callable[[], object],
        *,
        size: int,
        start: str,
        launcher: str,
        once: bool = False,
        replaces: int | None = None,
        timeout_s: float = TIMEOUT_S,
        now: float = 0.0,
    ) -> None:
        self.own = own
        self.leader: str | None = None
        """The name of the reachable leader, None without one."""
        self.plan: Plan | None = None
        """The plan of the newest known claim."""
        self.number = 0
        """The number of the newest known claim."""
        self.inherited: Mapping[str, Any] = {}
        """The state that the end of an earlier start has left for this one."""
        self.phase: Phase = "starting"
        self._begun: Begun | None = None
        self._send = send
        self._folder = folder
        self._wake = wake
        self._size = size
        self._start = start
        self._launcher = launcher
        self._once = once
        self._replaces = replaces
        self._timeout = timeout_s
        self._now = now
        self._expected = Plan(0, "", tuple(member.name for member in expected), tuple(expected), {})
        self._known = {member.name: member for member in expected}
        self._electorate = dict(self._known)
        self._poller = StorePoller(folder, now)
        self._claim_writer = ClaimWriter(folder, self._new_claim)
        self._election = Election(now)
        self._leader_client = LeaderClient(size, launcher, send, timeout_s, now)
        self._followers = FollowerTracker(own, size, send, timeout_s)
        self._fresh = True
        """Whether this process has had no part in the run yet."""
        self._missed = 0
        """The generation in which an earlier process of this name may have had a part."""
        self._ours = 0
        """The newest claim that this process has made."""
        self._chosen_at = self._lease_at = now
        self._deferred: list[Deferred] = []
        self._listener: GroupListener
        self._calls: deque[Callable[[], None]] = deque()
        self._flushing = False

    # -- the leader proposes: a claim is made ------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """Whether the newest claim is this launcher's."""
        return self._ours == self.number > 0

    @property
    def alive(self) -> Mapping[str, Member]:
        """(Leader only.) The launchers that are heard from, this one included."""
        return self._followers.alive

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        """(Leader only.) Claim the next generation with all live launchers as members; ``prepare`` follows.

        ``payload["keep"]`` is the generation whose ranks keep running, 0 if they are restarted. Replaces a proposal
        that is not claimed yet. If another launcher claims the number, this one stops leading.
        """
        members = tuple(member for _, member in sorted(self.alive.items()))
        self._request(Plan(self.number + 1, self.own.name, slots, members, self._followers.sizes, payload).to_json())

    def end(
        self,
        code: int,
        reason: str,
        lost: Sequence[str] = (),
        unfit: Sequence[str] = (),
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        """(Leader only.) Claim the end of the run; ``GroupListener.over`` follows on all launchers.

        Nodes that were ``lost`` or are ``unfit`` are listed in the claim for the next start of the job, whose leader
        gets ``memory`` as ``inherited``.
        """
        told = {"code": code, "reason": reason, "lost": list(lost), "unfit": list(unfit)}
        self._request({"end": {**told, "memory": dict(memory)} if memory else told})

    def _request(self, plan: dict[str, Any]) -> None:
        if self.phase in ("claiming", "leading"):
            self._claim_writer.request(plan)
            self._claim_writer.tick(self._now)

    def _new_claim(self, plan: dict[str, Any]) -> Claim:
        keeps = plan["payload"]["keep"] if "payload" in plan else self.plan.generation if self.plan else 0
        return Claim(self.number + 1, self._start, self._launcher, len(self._known) == 1, plan, keeps=keeps)

    def _settle(self, mine: bool | None) -> None:
        """The claim in flight was made, or another launcher's was; None if that is unknown."""
        claim = self._claim_writer.settled(self._now, mine, self.number)
        if mine and claim.number > self.number:
            self.number = claim.number
            self._handle_own_claim(claim)
        elif not mine:
            # A launcher without the claim will see whose it is. So will a launcher that does not know whether it has
            # the claim.
            self._poller.request(self._now)
        self._claim_writer.tick(self._now)

    def _handle_own_claim(self, claim: Claim) -> None:
        """The newest claim is this launcher's."""
        self._ours = claim.number
        self._fresh = False
        self._claim_writer.made(claim.plan)
        if claim.end is not None:
            self._followers.send_heartbeat(Heartbeat(claim.number), self._now)
            self._leave_run(self._listener.over, claim.end)
            return
        before, self.plan = self.plan, Plan.from_json(claim.number, claim.plan)
        if self.phase not in ("claiming", "leading"):
            self._start_claiming()
        elif not self._claim_writer.answers(claim.plan):
            self._set_leader(None)
            self._set_leader(self.own.name)
        if self.phase == "claiming":
            self._followers.discount_stall(self._now - self._chosen_at)  # nobody has been asked meanwhile
        self.phase = "leading"
        self._lease_at = self._now + TELLING_S  # the claim shows as much; whoever polls the lease has been told by then
        self._prepare(self.plan)
        changes = changes_of(claim, self.plan, before or self._expected, self._size)
        self._followers.claimed(self.plan, self._now, changes)
        for body in self._leader_client.mail.take_all():
            self._notify(self._listener.received, self.own.name, body)
        self._claim_writer.tick(self._now)

    # -- the others see the claim, and obey ------------------------------------------------------------------------

    def _note_told(self, leader: str, message: Claimed) -> None:
        """``leader`` says that it has made a claim, which a look into the folder has to confirm."""
        claim = self._told_claim(leader, message)
        if claim is not None:
            self._folder.told(claim)

    def _told_claim(self, leader: str, message: Claimed) -> Claim | None:
        return claim_from(message, self.plan or self._expected, leader, self._start)

    def _handle_read(self, found: StoreRead) -> None:
        if self.phase == "starting" and found.full:
            self._handle_first_read(found.claim)
        elif found.claim is not None and found.number > self.number:
            self._handle_new_claim(found.claim)
        elif found.lease[0] > self.number:
            self._poller.request(self._now)
        elif found.full and found.number == self.number:
            self._run_deferred()
            self._repair_claim(found.claim)

    def _handle_first_read(self, newest: Claim | None) -> None:
        """The state of the run before this launcher came."""
        self.phase = "electing"
        self._election = Election(self._now)
        if newest is None:
            pass
        elif newest.start == self._start and (newest.end is None or self._once):
            self._missed = newest.number
            self._handle_new_claim(newest)
        elif is_older(self._start, newest.start) or self._is_foreign(newest):
            self._leave_run(self._listener.overtaken)
        else:
            self.number = newest.number
            if newest.end is not None and isinstance(memory := newest.plan["end"].get("memory"), dict):
                self.inherited = memory

    def _is_foreign(self, claim: Claim) -> bool:
        return self._replaces is not None and claim.number > self._replaces and not is_older(claim.start, self._start)

    def _handle_new_claim(self, claim: Claim) -> None:
        self.number = claim.number
        self._deferred.clear()
        self._poller.renewed(self._now)
        of_this_start = claim.start == self._start or not claim.launcher
        if claim.launcher == self._launcher:
            self._handle_own_claim(claim)
        elif not of_this_start and not is_older(claim.start, self._start):
            self._leave_run(self._listener.overtaken)
        elif of_this_start and claim.end is not None:
            self._leave_run(self._listener.over, claim.end)
        else:
            self._follow_claim(self._plan_of(claim, its_maker_counts=of_this_start))

    def _plan_of(self, claim: Claim, *, its_maker_counts: bool) -> Plan:
        """The plan of ``claim``, or one without a leader, after which another launcher claims the next generation.

        That is so for a damaged claim and for one whose maker does not count: a launcher left behind by a requeue.
        """
        if its_maker_counts:
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                return Plan.from_json(claim.number, claim.plan)
        payload = self.plan.payload if self.plan is not None else {}
        return Plan(claim.number, "", (), tuple(self._electorate.values()), {}, {**payload, "keep": 0})

    def _follow_claim(self, plan: Plan) -> None:
        """Another launcher has claimed the next generation."""
        if self.leader != plan.leader:
            self._set_leader(None)
        self._leader_client.members_version = 0
        self._claim_writer.forget()
        self._prepare(plan)
        member = plan.member(plan.leader)
        if member is None or plan.leader == self.own.name:
            self._seek()
        elif self.leader is None:
            self.phase = "following"
            self._leader_client.begin(member, self._now, self.number)

    def _prepare(self, plan: Plan) -> None:
        if plan.leader or self.plan is None:
            self._adopt(plan.members)
        self.plan = plan
        self._leader_client.ready = self._begun = None
        self._notify(self._listener.prepare, plan)

    def _adopt(self, members: Sequence[Member]) -> None:
        """These are the launchers of the run."""
        self._electorate = {member.name: member for member in members}
        self._known |= self._electorate

    def _repair_claim(self, found: Claim | None) -> None:
        """If this leader's claim file was damaged, claim the same plan again so that newcomers can follow it."""
        plan = self.plan
        intact = found is None or found.launcher == self._launcher
        if intact or plan is None or self.phase != "leading" or self._claim_writer.busy:
            return
        if self.alive.keys() >= set(plan.slots):
            self.propose(plan.slots, {**plan.payload, "keep": plan.generation} if self._begun else plan.payload)

    def _leave_run(self, call: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """The run has ended, or goes on without this launcher."""
        self.phase = "over"
        self._claim_writer.forget()
        self._notify(call, *args, **kwargs)

    # -- all are ready, and begin ----------------------------------------------------------------------------------

    def ready(self, number: int, answer: Ready) -> None:
        """All ranks of generations before ``number`` have ended on this node."""
        if number != self._missed:
            self._defer(number, answer)

    def _defer(self, number: int, what: Ready | Begun | None) -> None:
        """Report readiness, or begin, once a read confirms that generation ``number`` still holds."""
        self._deferred.append(Deferred(self._poller.request(self._now), number, what))

    def _run_deferred(self) -> None:
        """A read has confirmed the newest known generation: run the actions that waited for it."""
        due = [held for held in self._deferred if held.read <= self._poller.confirmed]
        self._deferred = [held for held in self._deferred if held.read > self._poller.confirmed]
        for what in (held.what for held in due if held.number == self.number):
            if isinstance(what, Ready):
                self._say_ready(what)
            else:
                self._begin(what)

    def _say_ready(self, answer: Ready) -> None:
        self._leader_client.ready = answer
        if self.phase == "leading":
            self._note_ready(self.own.name, answer)
        elif self._leader_client.leader is not None:
            self._leader_client.answer(self._leader_client.leader, self.number)

    def _note_ready(self, name: str, answer: Ready) -> None:
        """(Leader only.) A node of the plan is ready; with the last one all may begin."""
        if (begun := self._followers.ready(name, answer)) is not None:
            self._defer(self.number, begun)

    def _begin(self, begun: Begun | None) -> None:
        assert self.plan is not None
        if not self.holds:
            self._fresh = False
        elif self.phase == "leading" and begun is not None:
            self._begun = begun
            self._followers.begun(begun, self._now)
        else:
            return
        self._notify(self._listener.begin, self.plan, begun)

    # -- who leads -------------------------------------------------------------------------------------------------

    def _set_leader(self, leader: str | None) -> None:
        if self.leader != leader:
            self.leader = leader
            self._notify(self._listener.leader_changed, leader)

    def _seek(self) -> None:
        """Start an election."""
        self.phase = "electing"
        self._claim_writer.forget()
        self._leader_client.end()
        self._election = Election(self._now)

    def _start_claiming(self) -> None:
        """The election has picked this launcher: lead those that are reachable and claim the next generation."""
        reachable = self._election.reachable(self._now)
        self.phase = "claiming"
        self._chosen_at = self._now
        self._leader_client.end()
        self._followers.begin(((one.member, one.size, one.incarnation) for one in reachable.values()), self._now)
        self._set_leader(self.own.name)

    # -- calls of the listener -------------------------------------------------------------------------------------

    def _notify(self, call: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        self._calls.append(partial(call, *args, **kwargs))

    def flush(self) -> None:
        """Make the pending calls of the listener, which may cause further ones."""
        if self._flushing:
            return
        self._flushing = True
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._flushing = False


MOST_CHANGES = 256
"""With more, every launcher reads the file, 0.55 MB among 10,000. So many, 128 nodes that were replaced, are 3.5 kB,
and take 0.12 s of the leader of 10,000."""


def changes_of(claim: Claim, plan: Plan, base: Plan, size: int) -> Claimed | None:
    """What ``claim`` of ``plan`` changes in the plan ``base``, where nodes have ``size`` ranks; None if it is much.

    So of thousands of launchers not each reads the whole claim from the run's folder. The folder still decides: a claim
    that was sent counts once the file of its number is the newest. A launcher that cannot put the claim together, since
    it knows another generation, reads the file.
    """
    before, there = {*base.members}, {member.name for member in plan.members}
    joined = tuple(member for member in plan.members if member not in before)
    left = tuple(member.name for member in base.members if member.name not in there)
    places = {str(place): name for place, name in enumerate(plan.slots) if base.slots[place : place + 1] != (name,)}
    sizes = {name: other for name, other in plan.sizes.items() if other != size}
    if len(joined) + len(left) + len(places) + len(sizes) > MOST_CHANGES:
        return None
    return Claimed(
        claim.number, base.number, claim.launcher, claim.keeps, _mark(claim.plan),
        len(plan.slots), places, joined, left, size, sizes, dict(plan.payload), plan.leader_listens,
    )  # fmt: skip


def claim_from(message: Claimed, base: Plan, leader: str, start: str) -> Claim | None:
    """The claim of ``leader`` in ``message``; None if it does not follow from the plan ``base``."""
    if message.base != base.number or not 0 <= message.slots <= len(base.slots) + len(message.places):
        return None
    gone = {*message.left, *(member.name for member in message.joined)}
    members = [*(member for member in base.members if member.name not in gone), *message.joined]
    members.sort(key=lambda member: member.name)
    kept = (*base.slots, *("" for _ in message.places))
    slots = tuple(message.places.get(str(place), kept[place]) for place in range(message.slots))
    sizes = {member.name: message.sizes.get(member.name, message.size) for member in members}
    told = listening(members, leader, message.listens)
    plan = Plan(message.number, leader, slots, told, sizes, message.payload).to_json()
    if _mark(plan) != message.mark:
        return None
    return Claim(message.number, start, message.launcher, plan=plan, keeps=message.keeps)


def _mark(plan: Mapping[str, Any]) -> str:
    """The digest of a plan in a claim."""
    return blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=16).hexdigest()
