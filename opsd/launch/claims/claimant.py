"""One launcher before the claims: how a generation is proposed, claimed, prepared for and begun, and who leads it.

Which claim holds is what the folder says. A launcher follows the maker of the newest one; while that one is silent it
seeks the others, and one of them claims the next generation; whoever is passed over obeys the claim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, ParamSpec

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.authority import Claiming, Folder, Look, Looks, Plan, is_older
from opsd.launch.claims.leading import Leading
from opsd.launch.claims.messages import Beat, Begun, Listener, Message, Ready
from opsd.launch.claims.peers import Following
from opsd.launch.claims.seeking import Seeking
from opsd.launch.io.protocol import Member

TIMEOUT_S = 1.5
Phase = Literal["looking", "seeking", "claiming", "leading", "following", "over"]
"""Before the first read; no leader; elected; leading; following; done: the run has ended or goes on elsewhere."""
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class Held:
    """What waits for ``look`` to show that generation ``number`` is the newest.

    Ready: to say that this node is. Begun: to begin; None: to hear that it has begun without this process.
    """

    look: int
    number: int
    what: Ready | Begun | None


class Claimant:
    """``send`` may lose messages; ``expected`` are the launchers of a run that has not begun, the own one included.

    ``launcher`` names this process, ``start`` is what those of one start of the run have in common, and ``size`` is how
    many ranks this node runs. ``wake`` makes ``flush`` be called soon. ``once``: no later attempt at the run has the
    same ``start``, so that who comes after its end has nothing to wait for.
    """

    def __init__(
        self,
        own: Member,
        expected: Sequence[Member],
        send: Callable[[Member, Message], None],
        folder: Folder,
        wake: Callable[[], object],
        *,
        size: int,
        start: str,
        launcher: str,
        once: bool = False,
        timeout_s: float = TIMEOUT_S,
        now: float = 0.0,
    ) -> None:
        self.own = own
        self.leader: str | None = None
        """The name of the leader within reach, None while there is none."""
        self.plan: Plan | None = None
        """Of the newest claim that is known."""
        self.number = 0
        """Of the newest claim that is known, by whomever."""
        self.phase: Phase = "looking"
        self._begun: Begun | None = None
        self._send = send
        self._folder = folder
        self._wake = wake
        self._size = size
        self._start = start
        self._launcher = launcher
        self._once = once
        self._timeout = timeout_s
        self._now = now
        self._known = {member.name: member for member in expected}
        self._body = dict(self._known)
        self._looks = Looks(folder, now)
        self._claiming = Claiming(folder, self._new_claim)
        self._seeking = Seeking(now)
        self._following = Following(size, launcher, send, timeout_s, now)
        self._leading = Leading(own, size, send, timeout_s)
        self._fresh = True
        """Whether this process had no part in the run so far."""
        self._missed = 0
        """The generation that another process of this name may have had a part in."""
        self._ours = 0
        """The newest claim that this process has made."""
        self._chosen_at = self._lease_at = now
        self._held: list[Held] = []
        self._listener: Listener
        self._calls: deque[Callable[[], None]] = deque()
        self._flushing = False

    # -- the leader proposes: a claim is made ------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """Whether the newest claim is this launcher's."""
        return self._ours == self.number > 0

    @property
    def alive(self) -> Mapping[str, Member]:
        """(On the leader.) The launchers that are being heard of, itself included."""
        return self._leading.alive

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        """(Leader only.) Claim the next generation, with all that are alive as members; ``Listener.prepare`` follows.

        ``payload["keep"]`` is the generation whose ranks run on under this leader, 0 if they are restarted. Replaces a
        proposal that is not claimed yet. Somebody else's claim ends this launcher's time as leader.
        """
        members = tuple(member for _, member in sorted(self.alive.items()))
        self._want(Plan(self.number + 1, self.own.name, slots, members, self._leading.sizes, payload).to_json())

    def end(self, code: int, reason: str, lost: Sequence[str] = (), unfit: Sequence[str] = ()) -> None:
        """(Leader only.) Claim the end of the run; ``Listener.over`` follows, on all launchers.

        Nodes that were ``lost``, or are ``unfit``, stand in the claim for whoever runs the job again.
        """
        self._want({"end": {"code": code, "reason": reason, "lost": list(lost), "unfit": list(unfit)}})

    def _want(self, plan: dict[str, Any]) -> None:
        if self.phase in ("claiming", "leading"):
            self._claiming.want(plan)
            self._claiming.tick(self._now)

    def _new_claim(self, plan: dict[str, Any]) -> Claim:
        keeps = plan["payload"]["keep"] if "payload" in plan else self.plan.generation if self.plan else 0
        return Claim(self.number + 1, self._start, self._launcher, len(self._known) == 1, plan, keeps=keeps)

    def _settle(self, mine: bool | None) -> None:
        """The claim under way is made, or somebody else's is; None if that is not known."""
        claim = self._claiming.settled(self._now, mine, self.number)
        if mine and claim.number > self.number:
            self.number = claim.number
            self._won(claim)
        elif not mine:
            # Who has not got it will see whose it is; who does not know whether it has will see that, too.
            self._looks.want(self._now)
        self._claiming.tick(self._now)

    def _won(self, claim: Claim) -> None:
        """The newest claim is this launcher's."""
        self._ours = claim.number
        self._fresh = False
        self._claiming.made(claim.plan)
        if claim.end is not None:
            self._leading.say(Beat(claim.number), self._now)
            self._leave_run(self._listener.over, claim.end)
            return
        self.plan = Plan.from_json(claim.number, claim.plan)
        if self.phase not in ("claiming", "leading"):
            self._take_lead()
        elif not self._claiming.answers(claim.plan):
            self._set_leader(None)
            self._set_leader(self.own.name)
        if self.phase == "claiming":
            self._leading.forgive(self._now - self._chosen_at)  # nobody has been asked meanwhile
        self.phase = "leading"
        self._lease_at = self._now
        self._prepare(self.plan)
        self._leading.claimed(self.plan, self._now)
        for body in self._following.tells.take_all():
            self._notify(self._listener.received, self.own.name, body)
        self._claiming.tick(self._now)

    # -- the others see the claim, and obey ------------------------------------------------------------------------

    def _see(self, found: Look) -> None:
        """What a look has found."""
        if self.phase == "looking" and found.whole:
            self._arrive(found.claim)
        elif found.claim is not None and found.number > self.number:
            self._learn(found.claim)
        elif found.lease[0] > self.number:
            self._looks.want(self._now)
        elif found.whole and found.number == self.number:
            self._release()
            self._mend(found.claim)

    def _arrive(self, newest: Claim | None) -> None:
        """The first look: what there was before this launcher."""
        self.phase = "seeking"
        self._seeking = Seeking(self._now)
        if newest is None:
            pass
        elif newest.start == self._start and (newest.end is None or self._once):
            self._missed = newest.number
            self._learn(newest)
        elif is_older(self._start, newest.start):
            self._leave_run(self._listener.overtaken)
        else:
            self.number = newest.number

    def _learn(self, claim: Claim) -> None:
        """There is a newer claim than the one that was known."""
        self.number = claim.number
        self._held.clear()
        self._looks.renewed(self._now)
        of_this_start = claim.start == self._start or not claim.launcher
        if claim.launcher == self._launcher:
            self._won(claim)
        elif not of_this_start and not is_older(claim.start, self._start):
            self._leave_run(self._listener.overtaken)
        elif of_this_start and claim.end is not None:
            self._leave_run(self._listener.over, claim.end)
        else:
            self._obey(self._plan_of(claim, its_maker_counts=of_this_start))

    def _plan_of(self, claim: Claim, *, its_maker_counts: bool) -> Plan:
        """If nobody can follow the claim its number counts, and somebody has to claim the next.

        It is damaged, or its maker does not count: a launcher that Slurm's requeue has left behind.
        """
        if its_maker_counts:
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                return Plan.from_json(claim.number, claim.plan)
        payload = self.plan.payload if self.plan is not None else {}
        return Plan(claim.number, "", (), tuple(self._body.values()), {}, {**payload, "keep": 0})

    def _obey(self, plan: Plan) -> None:
        """Somebody else has claimed the next generation."""
        if self.leader != plan.leader:
            self._set_leader(None)
        self._following.roster = 0
        self._claiming.forget()
        self._prepare(plan)
        member = plan.member(plan.leader)
        if member is None or plan.leader == self.own.name:
            self._seek()
        elif self.leader is None:
            self.phase = "following"
            self._following.begin(member, self._now, self.number)

    def _prepare(self, plan: Plan) -> None:
        if plan.leader or self.plan is None:
            self._body = {member.name: member for member in plan.members}
            self._known |= self._body
        self.plan = plan
        self._following.ready = self._begun = None
        self._notify(self._listener.prepare, plan)

    def _mend(self, found: Claim | None) -> None:
        """If somebody has damaged this leader's claim, which nobody who comes could follow: claim the same again."""
        plan = self.plan
        intact = found is None or found.launcher == self._launcher
        if intact or plan is None or self.phase != "leading" or self._claiming.busy:
            return
        if self.alive.keys() >= set(plan.slots):
            self.propose(plan.slots, {**plan.payload, "keep": plan.generation} if self._begun else plan.payload)

    def _leave_run(self, call: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """It has ended, or goes on without this launcher."""
        self.phase = "over"
        self._claiming.forget()
        self._notify(call, *args, **kwargs)

    # -- all are ready, and begin ----------------------------------------------------------------------------------

    def ready(self, number: int, answer: Ready) -> None:
        """This node has ended all ranks of generations before ``number``."""
        if number != self._missed:
            self._hold(number, answer)

    def _hold(self, number: int, what: Ready | Begun | None) -> None:
        """Say that this node is ready, or begin, once a look has shown that generation ``number`` still holds."""
        self._held.append(Held(self._looks.want(self._now), number, what))

    def _release(self) -> None:
        """A look has shown that the newest generation that is known is the newest: do what waited for that."""
        due = [held for held in self._held if held.look <= self._looks.confirmed]
        self._held = [held for held in self._held if held.look > self._looks.confirmed]
        for what in (held.what for held in due if held.number == self.number):
            if isinstance(what, Ready):
                self._say_ready(what)
            else:
                self._begin(what)

    def _say_ready(self, answer: Ready) -> None:
        self._following.ready = answer
        if self.phase == "leading":
            self._note_ready(self.own.name, answer)
        elif self._following.leader is not None:
            self._following.answer(self._following.leader, self.number)

    def _note_ready(self, name: str, answer: Ready) -> None:
        """(On the leader.) A node of the plan is ready; with the last of them all may begin."""
        if (begun := self._leading.ready(name, answer)) is not None:
            self._hold(self.number, begun)

    def _begin(self, begun: Begun | None) -> None:
        assert self.plan is not None
        if not self.holds:
            self._fresh = False
        elif self.phase == "leading" and begun is not None:
            self._begun = begun
            self._leading.begun(begun, self._now)
        else:
            return
        self._notify(self._listener.begin, self.plan, begun)

    # -- who leads -------------------------------------------------------------------------------------------------

    def _set_leader(self, leader: str | None) -> None:
        """``leader`` leads from now on, None if nobody does."""
        if self.leader != leader:
            self.leader = leader
            self._notify(self._listener.leader_changed, leader)

    def _seek(self) -> None:
        """Look for a leader, or for those without one."""
        self.phase = "seeking"
        self._claiming.forget()
        self._following.end()
        self._seeking = Seeking(self._now)

    def _take_lead(self) -> None:
        """Lead those that are near: claim the next generation."""
        near = self._seeking.near(self._now)
        self.phase = "claiming"
        self._chosen_at = self._now
        self._following.end()
        self._leading.begin(((one.member, one.size, one.incarnation) for one in near.values()), self._now)
        self._set_leader(self.own.name)

    # -- calls of the listener -------------------------------------------------------------------------------------

    def _notify(self, call: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        self._calls.append(partial(call, *args, **kwargs))

    def flush(self) -> None:
        """Make the calls of the listener that are due; it finds this at rest and may ask for more."""
        if self._flushing:
            return
        self._flushing = True
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._flushing = False
