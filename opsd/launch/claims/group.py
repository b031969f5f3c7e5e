"""The launchers of a run as a group, seen by one of them: queries, timers and message handlers.

Heartbeats detect failures and carry mail; only claims decide. The group is a state machine without I/O: time, messages
and results of the store come in; messages, reads, claims and calls of the listener go out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opsd.launch.claims.claim_store import Plan, StoreRead
from opsd.launch.claims.election import MINORITY_WAIT_S, ElectionView
from opsd.launch.claims.generation_state import GenerationState
from opsd.launch.claims.messages import (
    Body,
    Broadcast,
    Claimed,
    GroupListener,
    Heartbeat,
    HeartbeatReply,
    Join,
    LeaderMail,
    LeaderMailAck,
    Leave,
    MemberChanges,
    MemberList,
    Message,
    Seek,
    SeekReply,
)
from opsd.launch.claims.peers import interval_s
from opsd.launch.io.protocol import Member

STALL_S = 0.5
"""Not ticked for so long, this launcher itself was held up: the others get that time, and the store is read at once."""
CLAIM_S = 5.0
"""A launcher that was elected and has nothing to claim gives up after this."""
LEASE_S = 1.0
CUT_OFF_S = 5.0
"""Without a leader and without an answer of the store for so long, the ranks here may have been superseded."""


class Group(GenerationState):
    """Called from the launcher's loop, as its ``GroupListener`` is."""

    def start(self, listener: GroupListener) -> None:
        """Join the group; ``listener`` is called from now on. Raises OSError if the port is taken."""
        self._listener = listener
        self._succession_cache: tuple[Plan | None, Mapping[str, Member], str, tuple[str, ...]] = (None, {}, "", ())
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
    def members(self) -> Mapping[str, Member]:
        """The launchers that the leader was last known to hear from."""
        return self.alive if self.phase == "leading" else self._electorate

    @property
    def member_count(self) -> int:
        """The number of ``members``; cheap, for it is asked for each new connection."""
        return len(self._followers.peers) + 1 if self.phase == "leading" else len(self._electorate)

    @property
    def leaderless_s(self) -> float:
        """Seconds since the last leader was heard from."""
        return self._now - self._leader_client.heard

    @property
    def replacing(self) -> bool:
        """(Leader only.) Whether a claim that ends the running ranks is requested or in flight."""
        return self.leader == self.own.name and self._claim_writer.replacing

    @property
    def folder_silent_s(self) -> float:
        """For how many seconds the run's folder has not answered, or has taken no claims."""
        failing = self._claim_writer.failing_since
        return self._now - min(self._poller.last, self._now if failing is None else failing)

    @property
    def folder_error(self) -> OSError | None:
        """Why the run's folder cannot be used, None while it answers or has not answered yet."""
        return self._folder.error

    def tell_leader(self, body: Body) -> None:
        """Send to the leader; kept until there is one, and sent again to the next one if it was not confirmed."""
        if self.phase == "leading":
            self._notify(self._listener.received, self.own.name, body)
            self._wake()
        else:
            self._leader_client.tell(body, now_heard=self.leader is not None)

    def tell_all(self, body: Body) -> None:
        """(Leader only.) Send to every live launcher, this one included."""
        self._followers.broadcast(body)
        self._notify(self._listener.received, self.own.name, body)
        self._wake()

    def leave(self) -> None:
        """Announce that this launcher ends, so that nobody who is in touch with it waits for its timeout."""
        for member in self._in_touch():
            if member.name != self.own.name:
                self._send(member, Leave())

    def _in_touch(self) -> Iterable[Member]:
        """Those that this launcher leads, its leader, or those that seek one as it does; not all of thousands."""
        if self.leader == self.own.name:
            return self.alive.values()
        if self._leader_client.leader is not None:
            return [self._leader_client.leader]
        return [one.member for one in self._election.reachable(self._now).values()]

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Advance the time to ``now``, monotonic seconds; to be called about ten times a second."""
        stall = now - self._ticked
        self._now = self._ticked = now
        if stall > STALL_S:
            for part in (self._followers, self._election, self._leader_client):
                part.discount_stall(stall)
            self._poller.request(now)
        if self.phase == "following":
            self._watch_leader()
        elif self.phase == "electing":
            self._run_election()
            self._renew()
        elif self.phase == "leading":
            self._watch_others()
            self._renew()
        elif self.phase == "claiming" and not self._claim_writer.busy and now >= self._chosen_at + CLAIM_S:
            self._lose_leader()
        self._claim_writer.tick(now)
        self._note_cut_off()
        self._poller.tick(now, len(self._electorate), led=self.leader is not None)
        self.flush()

    def _watch_leader(self) -> None:
        if self._leader_client.silent(self._now):
            self._lose_leader()
        elif self.leader is None:
            self._leader_client.join(self._now, self.number)

    def _lose_leader(self) -> None:
        self._set_leader(None)
        self._seek()

    def _watch_others(self) -> None:
        self._leader_client.heard = self._now
        self._followers.tick(self._now)
        for name in self._followers.unready(self._now):
            self._lose(name)
        silent = self._followers.silent(self._now)
        if silent is None:  # be silent too, so that the others see that they are on their own
            self._electorate = dict(self._followers.electorate)
            self._lose_leader()
        for name in silent or ():
            self._lose(name)

    def _lose(self, name: str) -> None:
        silent_s = self._followers.drop(name, self._now)
        if silent_s is not None:
            self._notify(self._listener.lost, name, silent_s)

    def _renew(self) -> None:
        """Renew the lease, as the leader, or as a former leader that may lead again."""
        soon = self._now - self._election.since < MINORITY_WAIT_S
        hopes = self.phase == "leading" or soon or self._enough() or not self._listener.stuck()
        if self.holds and hopes and self._now >= self._lease_at:
            self._lease_at = self._now + LEASE_S
            self._beats += 1
            self._folder.renew(self.number, self._beats)

    def _note_cut_off(self) -> None:
        """Also for a leader that waits for the store to take its next generation: others may have claimed theirs."""
        if (self.leader is not None and not self.replacing) or self.phase in ("starting", "over"):
            self._leaderless_since, self._cut_off = self._now, False
        elif not self._cut_off and self._now - max(self._leaderless_since, self._poller.last) >= CUT_OFF_S:
            self._cut_off = True
            self._notify(self._listener.cut_off)

    # -- the folder ------------------------------------------------------------------------------------------------

    def store_read(self, now: float, found: StoreRead | None) -> None:
        """A read of the store has returned, None if it failed."""
        self._now = now
        self._poller.answered(now, found, self.number)
        if found is not None and self.phase != "over":
            self._handle_read(found)
            if self.phase == "electing":
                self._run_election()
        self.flush()

    def claimed(self, now: float, mine: bool | None) -> None:
        """The claim in flight was made, or another launcher's was; None if that is unknown."""
        self._now = now
        self._settle(mine)
        self.flush()

    # -- without a leader --------------------------------------------------------------------------------------------

    def _run_election(self) -> None:
        """Seek the others, and claim the next generation if it is this launcher's turn."""
        view = self._election_view()
        self._election.ask(self._now, view, self._known, self._send, Seek(**self._view()))
        if self._election.should_claim(self._now, view, self._timeout):
            self._start_claiming()
            if self.plan is not None and self.holds:
                self._resume(self.plan)

    def _resume(self, plan: Plan) -> None:
        """Lead again a generation that nobody has replaced meanwhile: its ranks may be running."""
        self.phase = "leading"
        self._followers.claimed(plan, self._now)
        if self._begun is not None:
            self._followers.begun(self._begun, self._now)
        elif self._leader_client.ready is not None:
            self._note_ready(self.own.name, self._leader_client.ready)

    def _election_view(self) -> ElectionView:
        plan = self.plan
        leader = plan.leader if plan is not None else ""
        if leader == self.own.name and not self.holds:
            leader = ""
        return ElectionView(
            self.own.name, self._succession(leader), self._electorate, self._gone, leader,
            plan is not None, self._fresh, self._poller.lease_idle_s(self._now), self._enough, self._listener.stuck,
        )  # fmt: skip

    def _succession(self, leader: str) -> tuple[str, ...]:
        """The launchers by precedence in the election. Cached: needed at every tick, for up to a thousand."""
        plan, electorate = self.plan, self._electorate
        known_plan, known_electorate, known_leader, order = self._succession_cache
        if known_plan is not plan or known_electorate is not electorate or known_leader != leader:
            names = (leader, *plan.slots, *sorted(electorate)) if plan is not None else tuple(electorate)
            order = tuple(dict.fromkeys(filter(None, names)))
            self._succession_cache = (plan, electorate, leader, order)
        return order

    def _enough(self) -> bool:
        others = {name: one.member for name, one in self._election.reachable(self._now).items()}
        return self._listener.enough({self.own.name: self.own, **others})

    def _view(self) -> dict[str, Any]:
        """What this launcher tells others that seek."""
        leader: Member | None = None
        if self.phase == "leading":
            leader = self.own
        elif self.leader is not None and self._leader_client.hears(self._now):
            leader = self._leader_client.leader
        return {
            "number": self.number, "size": self._size, "leader": leader, "fresh": self._fresh,
            "incarnation": self._launcher,
        }  # fmt: skip

    # -- messages --------------------------------------------------------------------------------------------------

    def receive(self, now: float, sender: Member, message: Message) -> None:
        """``message`` has come from ``sender``, which is authenticated."""
        self._now = now
        self._known[sender.name] = sender
        if not isinstance(message, Leave):
            self._gone.discard(sender.name)
        if isinstance(message, Seek | SeekReply | Join | Heartbeat | HeartbeatReply) and message.number > self.number:
            self._look_for_newer(sender, message)
        match message:
            case Leave():
                self.unreachable(now, sender.name)
            case Seek() if self.phase not in ("starting", "over"):  # it would not know for its own what counts it in
                if self.phase == "leading":
                    self._followers.tell_claim(sender, message.number)
                self._send(sender, SeekReply(**self._view()))
                if self.phase == "electing" and not self._election.heard_recently(sender.name, now):
                    self._send(sender, Seek(**self._view()))
            case SeekReply() if self.phase == "electing":
                self._handle_seek_reply(sender, message)
            case Heartbeat() if self.phase in ("following", "electing"):
                self._handle_heartbeat(sender, message)
            case Join() if self.phase == "leading":
                self._followers.tell_claim(sender, message.number)
                self._followers.join(sender, now)
            case HeartbeatReply() if self.phase == "leading":
                self._handle_heartbeat_reply(sender, message)
            case LeaderMail() if self.phase == "leading":
                self._deliver(sender, self._followers.take_mail(sender, message))
            case MemberList() if self.leader == sender.name and message.number == self.number:
                self._adopt(message.members)
                self._leader_client.members_version = message.version
            case MemberChanges() if self.leader == sender.name and message.number == self.number:
                self._change_members(message)
            case Claimed() if message.number > self.number and self.phase in ("following", "electing"):
                self._note_told(sender.name, message)
            case Broadcast() if self.leader == sender.name:
                self._deliver(sender, self._leader_client.take(message))
            case LeaderMailAck() if self.leader == sender.name:
                self._leader_client.mail.confirm(message.number)
            case _:
                pass
        self.flush()

    def _look_for_newer(self, sender: Member, message: Seek | SeekReply | Join | Heartbeat | HeartbeatReply) -> None:
        """``sender`` knows a newer claim than this launcher does; its maker has told what it changes before that."""
        hearsay = isinstance(message, Seek | SeekReply) and message.leader != sender
        if hearsay:
            self._poller.expect(self._now, len(self._electorate))
        else:
            self._poller.request(self._now)

    def _change_members(self, changes: MemberChanges) -> None:
        if self.plan is not None and self.plan.number == changes.number:
            self._adopt(self._members_after(self.plan, changes))
            self._leader_client.members_version = changes.version

    def _members_after(self, plan: Plan, changes: MemberChanges) -> tuple[Member, ...]:
        gone = {*changes.left, *(member.name for member in changes.joined)}
        return (*(member for member in plan.members if member.name not in gone), *changes.joined)

    def _handle_seek_reply(self, sender: Member, message: SeekReply) -> None:
        self._election.note(sender, message, self._now)
        plan, leader = self.plan, message.leader
        if leader is None or leader.name == self.own.name or message.number < self.number:
            return
        self._election.leader_alive(self._now)
        if plan is not None and leader.name == plan.leader:
            self._send(leader, Join(self.number))

    def _handle_heartbeat(self, sender: Member, beat: Heartbeat) -> None:
        """Follow the sender if the newest claim is its."""
        plan = self.plan
        if plan is not None and sender.name == plan.leader and beat.number == plan.number == self.number:
            self.phase = "following"
            self._leader_client.begin(sender, self._now, self.number)
            self._leader_client.hear(self._now, interval_s(len(self._electorate)), new=self.leader is None)
            self._set_leader(sender.name)
            if beat.begun is not None and self._begun is None:
                self._begun = beat.begun
                # If this node has not been ready another process of its name was: this one has no place in it.
                missed = self.own.name in plan.slots and self._leader_client.ready is None
                self._defer(plan.number, None if missed else beat.begun)
        if beat.number > 0:
            self._leader_client.answer(sender, self.number)

    def _handle_heartbeat_reply(self, sender: Member, message: HeartbeatReply) -> None:
        """(Leader only.) A follower, or one that wants to join, has answered a heartbeat."""
        if self._followers.is_new_process(sender, message):
            self._lose(sender.name)
        if self._followers.handle_reply(sender, message, self._now):
            self._notify(self._listener.joined, sender)
        if message.ready is not None and self._followers.awaits(sender, message):
            self._note_ready(sender.name, message.ready)

    def _deliver(self, sender: Member, body: Body | None) -> None:
        if body is not None:
            self._notify(self._listener.received, sender.name, body)

    def superseded(self, now: float) -> None:
        """The others work with a later process of this launcher's name."""
        self._now = now
        if self.phase != "over":
            self._leave_run(self._listener.overtaken)
        self.flush()

    def unreachable(self, now: float, name: str) -> None:
        """The launcher ``name`` has ended: its machine refuses connections, or it has said so."""
        self._now = now
        self._gone.add(name)
        self._election.drop(name)
        if self.phase in ("leading", "claiming"):
            self._lose(name)
        elif self._leader_client.leader is not None and name == self._leader_client.leader.name:
            self._lose_leader()
        self.flush()
