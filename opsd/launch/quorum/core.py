"""The agreement as a state machine: time and messages come in, messages and calls of the listener go out.

A head is elected (``election.py``); the launchers then agree on plans (``consent.py``, ``planning.py``). There is no
log to replicate: the one thing agreed on is the newest plan. The head is the hub of a star: it hears of everybody,
everybody hears of it. This part watches who is there, and takes each message to whom it concerns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opsd.launch.io.member import Member, Message, member_from_json, member_to_json
from opsd.launch.quorum.consent import Consent
from opsd.launch.quorum.election import Election
from opsd.launch.quorum.mail import Inbox, Mail, Outbox
from opsd.launch.quorum.outlet import Outlet
from opsd.launch.quorum.peers import Peer
from opsd.launch.quorum.planning import REPEAT_S, Planning
from opsd.launch.quorum.port import Listener, Plan
from opsd.launch.quorum.reach import TIMEOUT_S, Reach

SEEK_S, LIKELY = 1.0, 3
"""Without a head, so often the first so many launchers are asked for it."""
NEAR_S = 10.0
"""How often a launcher says something to the next head, and nothing more than that it is there."""
STALL_S = 0.5
"""Not called for so long, the launcher itself was held up, and the others are given that time."""


class Core:
    """One launcher's side. ``send`` may lose messages; ``listener`` is called from ``tick``, ``receive`` and ``flush``.

    A launcher that was started anew counts its messages on from a higher ``first_message`` than before.
    """

    def __init__(
        self,
        own: Member,
        initial: Sequence[Member],
        send: Callable[[Member, Message], None],
        *,
        first_number: int = 1,
        first_message: int = 1,
        timeout_s: float = TIMEOUT_S,
        now: float = 0.0,
    ) -> None:
        self.own = own
        self.consent = Consent(initial, first_number)
        self._out = Outlet(send)
        self._mail = Mail(Outbox(first_message))
        self._election = Election(own, self.consent, self._out, self._become_head, now)
        self._planning = Planning(self.consent, self._election, self._out)
        self._reach = Reach(own, self.consent, self._election, self._mail, self._out, timeout_s, now)
        self._ticked = now
        self._near_at = now + SEEK_S * self._election.turn() / (len(initial) + 1)

    # -- what the launcher asks ----------------------------------------------------------------------------------

    def start(self, listener: Listener) -> None:
        """Call ``listener`` from now on."""
        self._out.listen(listener)

    def flush(self) -> None:
        """Make the calls of the listener that are due."""
        self._out.flush()

    @property
    def head(self) -> str | None:
        """The name of the head, None while there is none."""
        return self._reach.head

    @property
    def term(self) -> int:
        """The newest that this launcher knows of."""
        return self._out.term

    @property
    def alive(self) -> Mapping[str, Member]:
        """(On the head.) Itself and those it hears of."""
        return {self.own.name: self.own} | {name: peer.member for name, peer in self._reach.peers.items()}

    @property
    def plan(self) -> Plan | None:
        """The newest plan that is known to be valid."""
        return self.consent.plan

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> int:
        """See ``Quorum.propose``. Without effect on a launcher that is head no longer, and does not know it yet."""
        number = self.consent.highest + 1
        if self._reach.is_head:
            alive = self.alive
            plan = Plan(number, slots, tuple(alive[name] for name in sorted(alive)), dict(payload))
            self._planning.propose(plan, self._reach.peers.values(), self._reach.now)
        return number

    def ready(self, number: int, answer: Message) -> None:
        """See ``Quorum.ready``."""
        if self._reach.is_head:
            self._planning.ready(number, answer, None)
            self._note_ready(self.own.name, number, answer)
        else:
            self._planning.ready(number, answer, self._reach.head_member)

    def tell_head(self, message: Message) -> None:
        """See ``Quorum.tell_head``."""
        if self._reach.is_head:
            self._out.call(lambda listener: listener.received(self.own.name, message))
            return
        parcel = self._mail.to_head.add(message)
        if self._reach.head_member is not None:
            self._out.post(self._reach.head_member, "tell", **parcel)

    def tell_all(self, message: Message) -> None:
        """See ``Quorum.tell_all``."""
        for name, peer in self._reach.peers.items():
            self._out.post(peer.member, "order", **self._mail.to.setdefault(name, Outbox()).add(message))
        self._out.call(lambda listener: listener.received(self.own.name, message))

    def decide_tie(self, go_on: bool) -> None:
        """See ``Quorum.decide_tie``."""
        self._reach.settle_tie(go_on)

    def leave(self) -> None:
        """Say goodbye to everybody."""
        for member in {**self.consent.electorate, **self.alive}.values():
            if member.name != self.own.name:
                self._out.post(member, "bye")

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed; to be called some ten times a second."""
        stall = now - self._ticked
        self._reach.now = self._ticked = now
        if stall > STALL_S:
            self._reach.forgive(stall)
        self._reach.tick()
        if not self._reach.is_head and now >= self._near_at:
            self._near_at = now + (SEEK_S if self.head is None else NEAR_S)
            self._keep_near()
        self.flush()

    def _keep_near(self) -> None:
        """Have a connection to whoever would be the next head, so that an election need not wait for it.

        Without a head, ask the most likely ones whether they are.
        """
        order = (
            member
            for name, member in self.consent.electorate.items()
            if name not in (self.head, self.own.name) and name not in self._election.gone
        )
        for member in itertools.islice(order, LIKELY if self.head is None else 1):
            self._out.post(member, "join" if self.head is None else "near")

    def _become_head(self) -> None:
        self._reach.become_head()

    # -- messages ------------------------------------------------------------------------------------------------

    def receive(self, now: float, sender: Member, message: Message) -> None:
        """``message`` has come from ``sender``, whose name is proven. Raises KeyError, TypeError or ValueError."""
        self._reach.now = now
        term, kind = int(message["term"]), str(message["kind"])
        self._election.answered[sender.name] = now
        if kind == "bye":
            self._bye(sender)
        elif kind == "ask":
            self._answer(sender, term, str(message["what"]), message["newest"])
        else:
            if term > self.term:
                self._enter(term)
            if self._reach.is_head:
                self._hear(sender, kind, message, term)
            else:
                self._heed(sender, kind, message, term)
        self.flush()

    def _enter(self, term: int) -> None:
        self._election.enter(term)
        if self._election.role != "follower":
            self._election.role = "follower"
            self._reach.set_head(None)
            self._election.look_around(self._reach.now)

    def unreachable(self, now: float, name: str) -> None:
        """The launcher ``name`` is no longer there: its machine answers and says so."""
        self._reach.now = now
        self._reach.gone(name)
        self.flush()

    def _bye(self, sender: Member) -> None:
        self._election.gone.add(sender.name)
        self._reach.gone(sender.name, 0.0)

    def _answer(self, sender: Member, term: int, what: str, newest: Sequence[int]) -> None:
        """Vote, or say beforehand how one would vote."""
        lives = self._reach.head_lives and sender.name != self.head
        yes = self._election.vote(sender.name, term, what, newest, lives, self._reach.now)
        late = tuple(newest) < self.consent.newest
        news = self._planning.news() if late and self.plan is not None else None
        member = self._reach.head_member
        head = member_to_json(member) if member is not None and lives else None
        self._out.post(sender, "say", what=what, yes=yes, highest=self.consent.highest, news=news, head=head)
        if self._reach.is_head and sender.name not in self._reach.peers:
            self._hear(sender, "join", {}, term)

    # -- messages to all but the head ----------------------------------------------------------------------------

    def _heed(self, sender: Member, kind: str, message: Message, term: int) -> None:
        if kind == "say":
            self._vote_counts(sender, message, term)
        elif kind in ("beat", "prepare", "begin", "order", "told"):
            if term == self.term:
                self._obey(sender, kind, message)
            else:  # a head of an earlier term, which this tells it
                self._out.post(sender, "here", plan=self.consent.number, orders=0)
        elif kind == "adrift" and sender.name == self.head and term == self.term:
            self._reach.lose_head()
            self._election.stand_after(self._reach.now, 0.0)
        elif kind == "join" and self._reach.head_member is not None:
            self._out.post(sender, "see", head=member_to_json(self._reach.head_member))
        elif kind == "see":
            self._out.post(member_from_json(message["head"]), "join")

    def _vote_counts(self, sender: Member, message: Message, term: int) -> None:
        self.consent.highest = max(self.consent.highest, int(message["highest"]))
        if message["news"] is not None:
            self._planning.learn(message["news"])
        if message["head"] is not None:
            self._out.post(member_from_json(message["head"]), "join")
        if message["yes"]:
            self._election.add_vote(sender.name, str(message["what"]), term, self._reach.now)

    def _obey(self, sender: Member, kind: str, message: Message) -> None:
        if self.head != sender.name or self._reach.head_peer is None:
            self._election.role = "follower"
            self._mail.of_head = Inbox()
            self._reach.set_head(sender.name, Peer(sender, self._reach.now))
            self._repeat(sender, "tell", self._mail.to_head)
        peer = self._reach.head_peer
        assert peer is not None
        peer.hear(self._reach.now, self._reach.interval_s)
        self._election.asking = ""
        if kind == "prepare":
            self._planning.prepare(sender, message)
        elif kind == "begin":
            self._planning.learn(message["news"])
        elif kind == "order":
            self._deliver(sender, self._mail.of_head.take(message))
        elif kind == "told":
            self._mail.to_head.confirm(int(message["number"]))
        elif now_and_then(peer, self._reach.now):
            self._repeat(sender, "tell", self._mail.to_head)
        if kind in ("beat", "order"):
            self._out.post(sender, "here", plan=self.consent.number, orders=self._mail.of_head.heard)

    # -- messages to the head ------------------------------------------------------------------------------------

    def _hear(self, sender: Member, kind: str, message: Message, term: int) -> None:
        peer = self._reach.peers.get(sender.name)
        if peer is None:
            peer = self._reach.peers[sender.name] = Peer(sender, self._reach.now)
            self._election.gone.discard(sender.name)
            self._out.call(lambda listener: listener.joined(sender))
            self._out.post(sender, "beat")
            self._planning.send_begin(peer, self._reach.now)
        peer.hear(self._reach.now, self._reach.interval_s)
        if term != self.term:
            self._out.post(sender, "beat")
        elif kind == "here":
            box = self._mail.to.setdefault(sender.name, Outbox())
            box.confirm(int(message["orders"]))
            self._planning.catch_up(peer, int(message["plan"]), self._reach.now)
            if now_and_then(peer, self._reach.now):
                self._repeat(sender, "order", box)
        elif kind == "ready":
            self._planning.note_ready(
                sender.name, int(message["number"]), message["answer"], self._reach.peers, self._reach.now
            )
        elif kind == "lack":
            self._planning.lacks(peer, int(message["plan"]), self._reach.now)
        elif kind == "tell":
            box_of = self._mail.of.setdefault(sender.name, Inbox())
            self._deliver(sender, box_of.take(message))
            self._out.post(sender, "told", number=box_of.heard)

    def _note_ready(self, name: str, number: int, answer: Message) -> None:
        self._planning.note_ready(name, number, answer, self._reach.peers, self._reach.now)

    # -- both ----------------------------------------------------------------------------------------------------

    def _deliver(self, sender: Member, body: Message | None) -> None:
        if body is not None:
            self._out.call(lambda listener: listener.received(sender.name, body))

    def _repeat(self, member: Member, kind: str, box: Outbox) -> None:
        for parcel in box.again():
            self._out.post(member, kind, **parcel)


def now_and_then(peer: Peer, now: float) -> bool:
    """True once in a while: what ``peer`` has not confirmed is to be sent again."""
    if now - peer.repeated < REPEAT_S:
        return False
    peer.repeated = now
    return True
