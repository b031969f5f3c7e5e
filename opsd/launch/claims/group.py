"""The launchers of a run as a group, seen by one of them: what it asks, and what time and messages do.

Heartbeats show who is there and carry what the leader and the others have to say; they decide nothing, claims do. A
state machine: time, messages and the folder's answers come in; messages, looks, claims and calls of the listener go
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opsd.launch.claims.authority import Look, Plan
from opsd.launch.claims.claimant import Claimant
from opsd.launch.claims.messages import (
    Beat,
    Body,
    Bye,
    Here,
    Join,
    Listener,
    Message,
    Near,
    Order,
    Roster,
    Seek,
    Tell,
    Told,
)
from opsd.launch.claims.peers import interval_s
from opsd.launch.claims.seeking import TURN_S, Situation
from opsd.launch.io.protocol import Member

STALL_S = 0.5
"""Not called for so long, the launcher itself was held up: the others are given that time, and it looks at once."""
CLAIM_S = 5.0
"""Who is to claim and has nothing to claim leaves it to another after this."""
LEASE_S = 1.0
CUT_OFF_S = 5.0
"""Without a leader and without an answer of the folder for so long, what runs here may have been passed over."""


class Group(Claimant):
    """Called from the launcher's loop, as its ``Listener`` is."""

    def start(self, listener: Listener) -> None:
        """Begin to look for the others, and call ``listener`` from now on. Raises OSError if the port is taken."""
        self._listener = listener
        self._ordered: tuple[Plan | None, Mapping[str, Member], str, tuple[str, ...]] = (None, {}, "", ())
        self._gone: set[str] = set()
        self._ticked = self._leaderless_since = self._now
        self._cut_off = False
        self._beats = 0

    # -- what the launcher asks ------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the ranks of the newest plan were started, as far as is known here."""
        return self._begun is not None

    @property
    def roster(self) -> Mapping[str, Member]:
        """The launchers that the leader was last known to hear of."""
        return self.alive if self.phase == "leading" else self._body

    @property
    def leaderless_s(self) -> float:
        """For how long nothing is heard of the last leader."""
        return self._now - self._following.heard

    @property
    def replacing(self) -> bool:
        """(On the leader.) Whether a claim is wanted or under way that ends the ranks which run."""
        return self.leader == self.own.name and self._claiming.replacing

    @property
    def folder_silent_s(self) -> float:
        """For how many seconds the run's folder has not answered, or takes no claims."""
        failing = self._claiming.failing_since
        return self._now - min(self._looks.last, self._now if failing is None else failing)

    @property
    def folder_error(self) -> OSError | None:
        """Why the run's folder cannot be used, None while it answers, or has not answered yet."""
        return self._folder.error

    def tell_leader(self, body: Body) -> None:
        """Send to the leader; kept until one is there, and sent to the next one if it was not confirmed."""
        if self.phase == "leading":
            self._notify(self._listener.received, self.own.name, body)
            self._wake()
        else:
            self._following.tell(body, now_heard=self.leader is not None)

    def tell_all(self, body: Body) -> None:
        """(Leader only.) Send to every launcher that is alive, itself included."""
        self._leading.order(body)
        self._notify(self._listener.received, self.own.name, body)
        self._wake()

    def leave(self) -> None:
        """Say goodbye, so that nobody waits for this launcher's silence."""
        for name, member in {**self._body, **self.alive}.items():
            if name != self.own.name:
                self._send(member, Bye())

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed; to be called some ten times a second."""
        stall = now - self._ticked
        self._now = self._ticked = now
        if stall > STALL_S:
            for part in (self._leading, self._seeking, self._following):
                part.forgive(stall)
            self._looks.want(now)
        if self.phase == "following":
            self._watch_leader()
        elif self.phase == "seeking":
            self._look_around()
            self._renew()
        elif self.phase == "leading":
            self._watch_others()
            self._renew()
        elif self.phase == "claiming" and not self._claiming.busy and now >= self._chosen_at + CLAIM_S:
            self._lose_leader()
        self._claiming.tick(now)
        self._note_cut_off()
        self._looks.tick(now, len(self._body))
        self.flush()

    def _watch_leader(self) -> None:
        if self._following.silent(self._now):
            self._lose_leader()
        elif self.leader is None:
            self._following.join(self._now, self.number)

    def _lose_leader(self) -> None:
        self._set_leader(None)
        self._seek()

    def _watch_others(self) -> None:
        """As the leader."""
        self._following.heard = self._now
        self._leading.tick(self._now)
        for name in self._leading.unready(self._now):
            self._lose(name)
        silent = self._leading.silent(self._now)
        if silent is None:  # be silent too, so that the others see that they are on their own
            self._body = dict(self._leading.body)
            self._lose_leader()
        for name in silent or ():
            self._lose(name)

    def _lose(self, name: str) -> None:
        silent_s = self._leading.lose(name, self._now)
        if silent_s is not None:
            self._notify(self._listener.lost, name, silent_s)

    def _renew(self) -> None:
        """Renew the lease, as the leader, and as one that hopes to be it again."""
        soon = self._now - self._seeking.since < TURN_S
        hopes = self.phase == "leading" or soon or self._enough() or not self._listener.stuck()
        if self.holds and hopes and self._now >= self._lease_at:
            self._lease_at = self._now + LEASE_S
            self._beats += 1
            self._folder.renew(self.number, self._beats)

    def _note_cut_off(self) -> None:
        """As a leader, too, that waits for the folder to take its next generation: others may have theirs."""
        if (self.leader is not None and not self.replacing) or self.phase in ("looking", "over"):
            self._leaderless_since, self._cut_off = self._now, False
        elif not self._cut_off and self._now - max(self._leaderless_since, self._looks.last) >= CUT_OFF_S:
            self._cut_off = True
            self._notify(self._listener.cut_off)

    # -- the folder ------------------------------------------------------------------------------------------------

    def looked(self, now: float, found: Look | None) -> None:
        """A look has come back, None if it failed."""
        self._now = now
        self._looks.answered(now, found, self.number)
        if found is not None and self.phase != "over":
            self._see(found)
            if self.phase == "seeking":
                self._look_around()
        self.flush()

    def claimed(self, now: float, mine: bool | None) -> None:
        """The claim under way is made, or somebody else's is; None if that is not known."""
        self._now = now
        self._settle(mine)
        self.flush()

    # -- without a leader --------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Ask who is there, and claim the next generation if it is this launcher's turn."""
        situation = self._situation()
        self._seeking.ask(self._now, situation, self._known, self._send, Seek(**self._view()))
        if self._seeking.to_lead(self._now, situation, self._timeout):
            self._take_lead()
            if self.plan is not None and self.holds:
                self._resume(self.plan)

    def _resume(self, plan: Plan) -> None:
        """Lead again what nobody has claimed meanwhile: its ranks may be running."""
        self.phase = "leading"
        self._leading.claimed(plan, self._now)
        if self._begun is not None:
            self._leading.begun(self._begun, self._now)
        elif self._following.ready is not None:
            self._note_ready(self.own.name, self._following.ready)

    def _situation(self) -> Situation:
        plan = self.plan
        leader = plan.leader if plan is not None else ""
        if leader == self.own.name and not self.holds:
            leader = ""
        return Situation(
            self.own.name, self._order(leader), self._body, self._gone, leader,
            plan is not None, self._fresh, self._looks.lease_idle_s(self._now), self._enough, self._listener.stuck,
        )  # fmt: skip

    def _order(self, leader: str) -> tuple[str, ...]:
        """Whose turn comes first. Kept, since it is wanted at every tick, and there may be a thousand to sort."""
        plan, body = self.plan, self._body
        if self._ordered[0] is not plan or self._ordered[1] is not body or self._ordered[2] != leader:
            order = (leader, *plan.slots, *sorted(body)) if plan is not None else tuple(body)
            self._ordered = (plan, body, leader, tuple(dict.fromkeys(filter(None, order))))
        return self._ordered[3]

    def _enough(self) -> bool:
        return self._listener.enough({self.own.name, *self._seeking.near(self._now)})

    def _view(self) -> dict[str, Any]:
        """What this launcher says of itself to those who seek."""
        leader: Member | None = None
        if self.phase == "leading":
            leader = self.own
        elif self.leader is not None and self._following.hears(self._now):
            leader = self._following.leader
        return {
            "number": self.number, "size": self._size, "leader": leader, "fresh": self._fresh,
            "incarnation": self._launcher,
        }  # fmt: skip

    # -- messages --------------------------------------------------------------------------------------------------

    def receive(self, now: float, sender: Member, message: Message) -> None:
        """``message`` has come from ``sender``, whose name is proven."""
        self._now = now
        self._known[sender.name] = sender
        if not isinstance(message, Bye):
            self._gone.discard(sender.name)
        if isinstance(message, Seek | Near | Join | Beat | Here) and message.number > self.number:
            self._looks.want(now)
        match message:
            case Bye():
                self.unreachable(now, sender.name)
            case Seek() if self.phase not in ("looking", "over"):  # it would not know for its own what counts it in
                self._send(sender, Near(**self._view()))
                if self.phase == "seeking" and not self._seeking.knows(sender.name, now):
                    self._send(sender, Seek(**self._view()))
            case Near() if self.phase == "seeking":
                self._note_near(sender, message)
            case Beat() if self.phase in ("following", "seeking"):
                self._heed(sender, message)
            case Join() if self.phase == "leading":
                self._leading.join(sender, now)
            case Here() if self.phase == "leading":
                self._hear(sender, message)
            case Tell() if self.phase == "leading":
                self._deliver(sender, self._leading.tell(sender, message))
            case Roster() if self.leader == sender.name and message.number == self.number:
                self._body = {member.name: member for member in message.members}
                self._known |= self._body
                self._following.roster = message.version
            case Order() if self.leader == sender.name:
                self._deliver(sender, self._following.take(message))
            case Told() if self.leader == sender.name:
                self._following.tells.confirm(message.number)
            case _:
                pass
        self.flush()

    def _note_near(self, sender: Member, message: Near) -> None:
        self._seeking.note(sender, message, self._now)
        plan, leader = self.plan, message.leader
        if leader is None or leader.name == self.own.name or message.number < self.number:
            return
        self._seeking.vouch(self._now)
        if plan is not None and leader.name == plan.leader:
            self._send(leader, Join(self.number))

    def _heed(self, sender: Member, beat: Beat) -> None:
        """Somebody leads: follow it if the newest claim is its."""
        plan = self.plan
        if plan is not None and sender.name == plan.leader and beat.number == plan.number == self.number:
            self.phase = "following"
            self._following.begin(sender, self._now, self.number)
            self._following.hear(self._now, interval_s(len(self._body)), new=self.leader is None)
            self._set_leader(sender.name)
            if beat.begun is not None and self._begun is None:
                self._begun = beat.begun
                # If this node has not been ready another process of its name was: this one has no place in it.
                missed = self.own.name in plan.slots and self._following.ready is None
                self._hold(plan.number, None if missed else beat.begun)
        if beat.number > 0:
            self._following.answer(sender, self.number)

    def _hear(self, sender: Member, message: Here) -> None:
        """(On the leader.) One that is led, or wants to be, has answered a heartbeat."""
        if self._leading.is_successor(sender, message):
            self._lose(sender.name)
        if self._leading.here(sender, message, self._now):
            self._notify(self._listener.joined, sender)
        if message.ready is not None and self._leading.awaits(sender, message):
            self._note_ready(sender.name, message.ready)

    def _deliver(self, sender: Member, body: Body | None) -> None:
        if body is not None:
            self._notify(self._listener.received, sender.name, body)

    def superseded(self, now: float) -> None:
        """The others work with a process of this launcher's name that was started later."""
        self._now = now
        if self.phase != "over":
            self._leave_run(self._listener.overtaken)
        self.flush()

    def unreachable(self, now: float, name: str) -> None:
        """The launcher ``name`` is no longer there: its machine answers and says so, or it has said goodbye."""
        self._now = now
        self._gone.add(name)
        self._seeking.drop(name)
        if self.phase in ("leading", "claiming"):
            self._lose(name)
        elif self._following.leader is not None and name == self._following.leader.name:
            self._lose_leader()
        self.flush()
