"""One launcher's part in the group, as a state machine: time, messages and the folder's answers come in, and go out.

A launcher follows the maker of the newest claim in the run's folder. While that one is silent it seeks the others, and
one of them claims the next generation; whoever is passed over obeys the claim. What launchers hear of each other only
says when to claim and what; which claim holds is what the folder says.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.claiming import Claiming
from opsd.launch.claims.following import Following
from opsd.launch.claims.leading import Leading, interval_s
from opsd.launch.claims.looks import Look, Looks
from opsd.launch.claims.messages import (
    Beat,
    Begun,
    Bye,
    Here,
    Join,
    Message,
    Near,
    Order,
    Ready,
    Roster,
    Seek,
    Tell,
    Told,
)
from opsd.launch.claims.plan import Plan
from opsd.launch.claims.port import Body, Folder, Listener
from opsd.launch.claims.seeking import TURN_S, Seeking, Situation
from opsd.launch.io.protocol import Member

TIMEOUT_S = 1.5
STALL_S = 0.5
"""Not called for so long, the launcher itself was held up: the others are given that time, and it looks at once."""
CLAIM_S = 5.0
"""Who is to claim and has nothing to claim leaves it to another after this."""
LEASE_S = 1.0
CUT_OFF_S = 5.0
"""Without a head and without an answer of the folder for so long, what runs here may have been passed over."""

Phase = Literal["looking", "seeking", "claiming", "leading", "following", "over"]
_RESTARTS = re.compile(r"(?P<job>.*, job [^,]*)\.(?P<count>\d+)(, .*)?")


class Core:
    """``send`` may lose messages; ``expected`` are the launchers of a run that has not begun, the own one included.

    ``launcher`` names this process, ``size`` is how many ranks its node runs.
    """

    def __init__(
        self,
        own: Member,
        expected: Sequence[Member],
        send: Callable[[Member, Message], None],
        folder: Folder,
        *,
        size: int,
        start: str,
        launcher: str,
        timeout_s: float = TIMEOUT_S,
        now: float = 0.0,
    ) -> None:
        self.own = own
        self.head: str | None = None
        self.plan: Plan | None = None
        self.number = 0
        """The newest that is known to be claimed, by whomever."""
        self.phase: Phase = "looking"
        self.leading = Leading(own, size, send, self, timeout_s)
        self._send = send
        self._folder = folder
        self._size = size
        self._start = start
        self._launcher = launcher
        self._timeout = timeout_s
        self._now = self._ticked = now
        self._known = {member.name: member for member in expected}
        self._body = dict(self._known)
        self._gone: set[str] = set()
        self._looks = Looks(folder, now)
        self._seeking = Seeking(now)
        self._following = Following(size, launcher, send, timeout_s, now)
        self._claiming = Claiming(folder, self._new_claim)
        self._fresh = True
        self._missed = 0
        """The generation that another process of this name may have had a part in."""
        self._ours = 0
        """The newest claim that this process has made."""
        self._begun: Begun | None = None
        self._cut_off = False
        self._headless_since = now
        self._chosen_at = 0.0
        self._lease_at = now
        self._beats = 0
        self._listener: Listener | None = None
        self._calls: deque[Callable[[Listener], None]] = deque()
        self._flushing = False

    # -- what the launcher asks ----------------------------------------------------------------------------------

    def start(self, listener: Listener) -> None:
        """Call ``listener`` from now on."""
        self._listener = listener

    @property
    def alive(self) -> Mapping[str, Member]:
        """(On the head.) Itself and those it hears of."""
        return self.leading.alive

    @property
    def roster(self) -> Mapping[str, Member]:
        """Who is there, as far as the head has said."""
        return self.leading.alive if self.phase == "leading" else self._body

    @property
    def begun(self) -> bool:
        """Whether the ranks of the newest plan were started, as far as is known here."""
        return self._begun is not None

    @property
    def holds(self) -> bool:
        """Whether the newest claim is this launcher's."""
        return self._ours == self.number > 0

    @property
    def headless_s(self) -> float:
        """For how long nothing is heard of the last head."""
        return self._now - self._following.heard

    @property
    def replacing(self) -> bool:
        """Whether this head waits for the folder to take a claim that ends the ranks which run."""
        return self.head == self.own.name and self._claiming.replacing

    @property
    def looked_at(self) -> float:
        """When the folder answered last."""
        return self._looks.last

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        """See ``Group.propose``."""
        alive = self.leading.alive
        members = tuple(alive[name] for name in sorted(alive))
        self._want(Plan(self.number + 1, self.own.name, slots, members, self.leading.sizes, payload).to_json())

    def end(self, code: int, reason: str, lost: Sequence[str] = (), unfit: Sequence[str] = ()) -> None:
        """See ``Group.end``."""
        self._want({"end": {"code": code, "reason": reason, "lost": list(lost), "unfit": list(unfit)}})

    def _want(self, plan: dict[str, Any]) -> None:
        if self.phase in ("claiming", "leading"):
            self._claiming.want(plan)
            self._claiming.tick(self._now)

    def ready(self, number: int, answer: Ready) -> None:
        """See ``Group.ready``: said once a look has shown that the plan still holds."""
        if number == self._missed:
            return

        def hold() -> None:
            if self.number != number:
                return
            self._following.ready = answer
            if self.phase == "leading":
                self.leading.own_ready(answer)
            elif self._following.head is not None:
                self._following.answer(self._following.head, number)

        self._looks.want(self._now, hold)

    def tell_head(self, body: Body) -> None:
        """See ``Group.tell_head``."""
        if self.phase == "leading":
            self._call(lambda listener: listener.received(self.own.name, body))
            return
        self._following.tell(body, now_heard=self.head is not None)

    def tell_all(self, body: Body) -> None:
        """See ``Group.tell_all``."""
        self.leading.order(body)
        self._call(lambda listener: listener.received(self.own.name, body))

    def leave(self) -> None:
        """Say goodbye to everybody."""
        for name, member in {**self._body, **self.leading.alive}.items():
            if name != self.own.name:
                self._send(member, Bye())

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed; to be called some ten times a second."""
        stall = now - self._ticked
        self._now = self._ticked = now
        if stall > STALL_S:
            self._forgive(stall)
        if self.phase == "following":
            self._watch_head()
        elif self.phase == "seeking":
            self._seek()
            self._renew()
        elif self.phase == "leading":
            self._following.heard = now
            self.leading.tick(now)
            self._renew()
        elif self.phase == "claiming":
            self._keep_claiming()
        self._claiming.tick(now)
        self._note_cut_off()
        self._looks.tick(now, len(self._body))
        self.flush()

    def _forgive(self, stall_s: float) -> None:
        self.leading.forgive(stall_s)
        self._seeking.forgive(stall_s)
        self._following.forgive(stall_s)
        self._looks.want(self._now)

    def _note_cut_off(self) -> None:
        """As a head, too, that waits for the folder to take its next generation: others may have theirs."""
        if (self.head is not None and not self.replacing) or self.phase in ("looking", "over"):
            self._headless_since, self._cut_off = self._now, False
        elif not self._cut_off and self._now - max(self._headless_since, self.looked_at) >= CUT_OFF_S:
            self._cut_off = True
            self._call(lambda listener: listener.cut_off())

    # -- the folder ----------------------------------------------------------------------------------------------

    def looked(self, now: float, found: Look | None) -> None:
        """A look has come back, None if it failed."""
        self._now = now
        self._looks.answered(now, found, self.number)
        if found is not None and self.phase != "over":
            number = found.claim.number if found.claim is not None else 0
            if self.phase == "looking" and found.whole:
                self._begin(found.claim)
            elif found.claim is not None and number > self.number:
                self._learn(found.claim)
            elif found.lease[0] > self.number:
                self._looks.want(self._now)
            elif found.whole and number == self.number:
                self._looks.done()
                self._mend(found.claim)
            if self.phase == "seeking":
                self._seek()
        self.flush()

    def _begin(self, newest: Claim | None) -> None:
        """The first look: what there was before this launcher."""
        self.phase = "seeking"
        self._seeking = Seeking(self._now)
        if newest is None:
            return
        if newest.start == self._start and newest.end is None:
            self._missed = newest.number
            self._learn(newest)
        elif _is_older(self._start, newest.start):
            self._overtaken()
        else:
            self.number = newest.number

    def _learn(self, claim: Claim) -> None:
        """There is a newer claim than the one that was known."""
        self.number = claim.number
        self._looks.forget()
        self._looks.renewed(self._now)
        if claim.launcher == self._launcher:
            self._won(claim)
        elif claim.start == self._start or not claim.launcher:
            end = claim.end
            if end is not None:
                self._over(end)
            else:
                self._obey(self._plan_of(claim))
        elif _is_older(claim.start, self._start):
            # A launcher that Slurm's requeue has left behind: it has no say.
            self._obey(self._nobody(claim.number))
        else:
            self._overtaken()

    def _mend(self, found: Claim | None) -> None:
        """If somebody has damaged this head's claim, which nobody who comes could follow: claim the same again."""
        plan = self.plan
        intact = found is None or found.launcher == self._launcher
        if intact or plan is None or self.phase != "leading" or self._claiming.busy:
            return
        if self.leading.alive.keys() >= set(plan.slots):
            self.propose(plan.slots, {**plan.payload, "keep": plan.generation} if self.begun else plan.payload)

    def _plan_of(self, claim: Claim) -> Plan:
        try:
            return Plan.from_json(claim.number, claim.plan)
        except (KeyError, TypeError, ValueError, AttributeError):
            return self._nobody(claim.number)

    def _nobody(self, number: int) -> Plan:
        """What a claim comes to that nobody can follow: its number counts, and somebody has to claim the next."""
        payload = self.plan.payload if self.plan is not None else {}
        return Plan(number, "", (), tuple(self._body.values()), {}, {**payload, "keep": 0})

    def _overtaken(self) -> None:
        self.phase = "over"
        self._claiming.forget()
        self._call(lambda listener: listener.overtaken())

    def _over(self, end: End) -> None:
        self.phase = "over"
        self._claiming.forget()
        self._call(lambda listener: listener.over(end))

    def _obey(self, plan: Plan) -> None:
        """Somebody else has claimed the next generation."""
        if self.head != plan.head:
            self._part(None)
        if plan.head or self.plan is None:
            self._body = {member.name: member for member in plan.members}
            self._known |= self._body
        self.plan = plan
        self._following.ready = self._begun = None
        self._following.roster = 0
        self._claiming.forget()
        self._call(lambda listener: listener.prepare(plan))
        member = plan.member(plan.head)
        if member is None or plan.head == self.own.name:
            self._seek_anew()
        elif self.head is None:
            self.phase = "following"
            self._following.begin(member, self._now, self.number)

    def _part(self, head: str | None) -> None:
        """``head`` leads from now on, None if nobody does."""
        if self.head != head:
            self.head = head
            self._call(lambda listener: listener.head_changed(head))

    # -- claiming ------------------------------------------------------------------------------------------------

    def _new_claim(self, plan: dict[str, Any]) -> Claim:
        keeps = plan["payload"]["keep"] if "payload" in plan else self.plan.generation if self.plan else 0
        return Claim(self.number + 1, self._start, self._launcher, len(self._known) == 1, plan, keeps=keeps)

    def claimed(self, now: float, mine: bool | None) -> None:
        """The claim under way is made, or somebody else's is; None if that is not known."""
        self._now = now
        claim = self._claiming.settled(now, mine, self.number)
        if mine and claim.number > self.number:
            self.number = claim.number
            self._won(claim)
        elif not mine:
            # Who has not got it will see whose it is; who does not know whether it has will see that, too.
            self._looks.want(now)
        self._claiming.tick(now)
        self.flush()

    def _won(self, claim: Claim) -> None:
        """The newest claim is this launcher's."""
        self._ours = claim.number
        self._fresh = False
        self._claiming.made(claim.plan)
        if claim.end is not None:
            self.leading.say(Beat(claim.number), self._now)
            self._over(claim.end)
            return
        plan = self.plan = Plan.from_json(claim.number, claim.plan)
        if self.phase not in ("claiming", "leading"):
            self._take_lead()
        elif not self._claiming.answers(claim.plan):
            self._part(None)
            self._part(self.own.name)
        if self.phase == "claiming":
            self.leading.forgive(self._now - self._chosen_at)  # nobody has been asked meanwhile
        self.phase = "leading"
        self._following.ready = self._begun = None
        self._lease_at = self._now
        self._body = {member.name: member for member in plan.members}
        self._call(lambda listener: listener.prepare(plan))
        self.leading.claimed(plan, self._now)
        for body in self._following.take_tells():
            self._call(lambda listener, body=body: listener.received(self.own.name, body))  # type: ignore[misc]
        self._claiming.tick(self._now)

    def _renew(self) -> None:
        """Renew the lease, as the head, and as one that hopes to be it again."""
        soon = self._now - self._seeking.since < TURN_S
        hopes = self.phase == "leading" or soon or self._enough() or not self._stuck()
        if self.holds and hopes and self._now >= self._lease_at:
            self._lease_at = self._now + LEASE_S
            self._beats += 1
            self._folder.renew(self.number, self._beats)

    def _keep_claiming(self) -> None:
        if not self._claiming.busy and self._now >= self._chosen_at + CLAIM_S:
            self._part(None)
            self._seek_anew()

    # -- seeking -------------------------------------------------------------------------------------------------

    def _seek_anew(self) -> None:
        self.phase = "seeking"
        self._claiming.forget()
        self._following.end()
        self._seeking = Seeking(self._now)

    def _situation(self) -> Situation:
        plan = self.plan
        head = plan.head if plan is not None else ""
        if head == self.own.name and not self.holds:
            head = ""
        order = (head, *plan.slots, *sorted(self._body)) if plan is not None else tuple(self._body)
        return Situation(
            self.own.name, tuple(dict.fromkeys(filter(None, order))), self._body, self._gone, head,
            plan is not None, self._fresh, self._looks.lease_idle_s(self._now), self._enough, self._stuck,
        )  # fmt: skip

    def _stuck(self) -> bool:
        return self._listener is None or self._listener.stuck()

    def _enough(self) -> bool:
        here = {self.own.name, *self._seeking.near(self._now)}
        return self._listener is not None and self._listener.enough(here)

    def _seek(self) -> None:
        now, seeking, situation = self._now, self._seeking, self._situation()
        if len(self._known) > 1:
            others = dict.fromkeys((*situation.order, *self._known))
            left = self._gone - {self.plan.head if self.plan is not None else ""}  # the head does not look for others
            asked = [name for name in others if name != self.own.name and name not in left]
            ahead = sum(name not in self._gone for name in situation.order[: situation.place])
            seeking.ask(now, asked, ahead, self._known, self._send, Seek(**self._view()))
        if seeking.to_lead(now, situation, self._timeout):
            self._take_lead()
            plan = self.plan
            if plan is not None and self.holds:
                self._resume(plan)

    def _resume(self, plan: Plan) -> None:
        """Lead again what nobody has claimed meanwhile: its ranks may be running."""
        self.phase = "leading"
        self.leading.claimed(plan, self._now)
        if self._begun is not None:
            self.leading.begun(self._begun, self._now)
        elif self._following.ready is not None:
            self.leading.own_ready(self._following.ready)

    def _take_lead(self) -> None:
        near = self._seeking.near(self._now)
        self.phase = "claiming"
        self._chosen_at = self._now
        self._following.end()
        self.leading.begin(((one.member, one.size, one.incarnation) for one in near.values()), self._now)
        self._part(self.own.name)

    def _view(self) -> dict[str, Any]:
        """What this launcher says of itself to those who seek."""
        head: Member | None = None
        if self.phase == "leading":
            head = self.own
        elif self.head is not None and self._following.hears(self._now):
            head = self._following.head
        return {
            "number": self.number, "size": self._size, "head": head, "fresh": self._fresh,
            "incarnation": self._launcher,
        }  # fmt: skip

    # -- following -----------------------------------------------------------------------------------------------

    def _watch_head(self) -> None:
        if self._following.silent(self._now):
            self._lose_head()
        elif self.head is None:
            self._following.join(self._now, self.number)

    def _lose_head(self) -> None:
        self._part(None)
        self._seek_anew()

    # -- messages ------------------------------------------------------------------------------------------------

    def receive(self, now: float, sender: Member, message: Message) -> None:
        """``message`` has come from ``sender``, whose name is proven."""
        self._now = now
        self._known[sender.name] = sender
        if not isinstance(message, Bye):
            self._gone.discard(sender.name)
        match message:
            case Seek():
                if self.phase not in ("looking", "over"):  # it would not know for its own, or obey, what counts it in
                    self._send(sender, Near(**self._view()))
                    if self.phase == "seeking" and not self._seeking.knows(sender.name, now):
                        self._send(sender, Seek(**self._view()))
                self._compare(message.number)
            case Near():
                self._note_near(sender, message)
            case Beat():
                self._heed(sender, message)
            case Roster() if self.head == sender.name and message.number == self.number:
                self._body = {member.name: member for member in message.members}
                self._known |= self._body
                self._following.roster = message.version
            case Order() if self.head == sender.name:
                body = self._following.take(message)
                if body is not None:
                    self._call(lambda listener: listener.received(sender.name, body))
            case Told() if self.head == sender.name:
                self._following.confirmed(message.number)
            case Join() | Here() | Tell() if self.phase == "leading":
                self._hear(sender, message)
            case Join() | Here():
                self._compare(message.number)
            case Bye():
                self.unreachable(now, sender.name)
            case _:
                pass
        self.flush()

    def _compare(self, number: int) -> None:
        """Somebody knows of a newer claim, or says so: look."""
        if number > self.number:
            self._looks.want(self._now)

    def _note_near(self, sender: Member, message: Near) -> None:
        self._compare(message.number)
        if self.phase != "seeking":
            return
        self._seeking.note(sender, message, self._now)
        plan, head = self.plan, message.head
        if head is None or head.name == self.own.name or message.number < self.number:
            return
        self._seeking.vouch(self._now)
        if plan is not None and head.name == plan.head:
            self._send(head, Join(self.number))

    def _heed(self, sender: Member, beat: Beat) -> None:
        self._compare(beat.number)
        if self.phase not in ("following", "seeking"):
            return
        plan = self.plan
        if plan is not None and sender.name == plan.head and beat.number == plan.number == self.number:
            self.phase = "following"
            self._following.begin(sender, self._now, self.number)
            self._following.hear(self._now, interval_s(len(self._body)), new=self.head is None)
            self._part(sender.name)
            if beat.begun is not None and self._begun is None:
                self._hold(plan, beat.begun)
        if beat.number > 0:
            self._following.answer(sender, self.number)

    def _hold(self, plan: Plan, begun: Begun) -> None:
        """All are ready: begin, once a look has shown that the plan still holds.

        If this node has not been ready, it was another process of its name that was: this one has no place in it.
        """
        self._begun = begun
        missed = self.own.name in plan.slots and self._following.ready is None

        def begin() -> None:
            if self.number == plan.number:
                self._fresh = False
                self._call(lambda listener: listener.begin(plan, None if missed else begun))

        self._looks.want(self._now, begin)

    def _hear(self, sender: Member, message: Join | Here | Tell) -> None:
        if isinstance(message, Tell):
            self.leading.tell(sender, message)
            return
        self._compare(message.number)
        if isinstance(message, Here):
            self.leading.here(sender, message, self._now)
        else:
            self.leading.join(sender, self._now)

    def unreachable(self, now: float, name: str) -> None:
        """The launcher ``name`` is no longer there: its machine answers and says so, or it has said goodbye."""
        self._now = now
        self._gone.add(name)
        self._seeking.drop(name)
        if self.phase in ("leading", "claiming"):
            self.leading.lose(name, now)
        elif self._following.head is not None and name == self._following.head.name:
            self._lose_head()
        self.flush()

    # -- as the head's side reports ------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """See ``Report.joined``."""
        self._call(lambda listener: listener.joined(member))

    def lost(self, name: str, silent_s: float) -> None:
        """See ``Report.lost``."""
        self._call(lambda listener: listener.lost(name, silent_s))

    def told(self, sender: str, body: Body) -> None:
        """See ``Report.told``."""
        self._call(lambda listener: listener.received(sender, body))

    def too_few(self) -> None:
        """See ``Report.too_few``: fall silent, so that the others see that they are on their own."""
        self._body = dict(self.leading.body)
        self._part(None)
        self._seek_anew()

    def all_ready(self, begun: Begun) -> None:
        """See ``Report.all_ready``."""
        plan = self.plan
        assert plan is not None

        def begin() -> None:
            if self.phase == "leading" and self.number == plan.number:
                self._begun = begun
                self.leading.begun(begun, self._now)
                self._call(lambda listener: listener.begin(plan, begun))

        self._looks.want(self._now, begin)

    # -- calls of the listener -----------------------------------------------------------------------------------

    def _call(self, call: Callable[[Listener], None]) -> None:
        self._calls.append(call)

    def flush(self) -> None:
        """Make the calls of the listener that are due; it finds this at rest and may ask for more."""
        if self._flushing or self._listener is None:
            return
        self._flushing = True
        try:
            while self._calls:
                self._calls.popleft()(self._listener)
        finally:
            self._flushing = False


def _is_older(start: str, than: str) -> bool:
    """Whether ``start`` is the same Slurm job's as ``than``, before a requeue."""
    one, other = _RESTARTS.fullmatch(start), _RESTARTS.fullmatch(than)
    if one is None or other is None:
        return False
    return one["job"] == other["job"] and int(one["count"]) < int(other["count"])
