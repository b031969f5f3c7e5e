"""The leader's side: heartbeats to all, who is there, who is ready, and what it says to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opsd.launch.claims.authority import Plan
from opsd.launch.claims.messages import Beat, Begun, Body, Here, Message, Order, Ready, Roster, Tell, Told
from opsd.launch.claims.peers import BEATS_MISSED, Follower, Outbox, Share, interval_s, share
from opsd.launch.io.protocol import Member

ROSTER_S = 0.2
"""After somebody has come or gone: how long others may follow before all are told."""
READY_LIMIT_S = 90.0
"""A node that is there and has not ended its ranks for so long is given up, once all others are ready."""


class Leading:
    """While this launcher is leader. ``send`` may lose messages."""

    def __init__(self, own: Member, size: int, send: Callable[[Member, Message], None], timeout_s: float) -> None:
        self.peers: dict[str, Follower] = {}
        self.body: dict[str, Member] = {}
        """All whose silence counts: who was there when it was last agreed on."""
        self._own = own
        self._size = size
        self._send = send
        self._timeout = timeout_s
        self._coming: dict[str, Follower] = {}
        self._ordered = 0
        """How many there were. Numbers are not used twice: who is taken in again may have heard the first ones."""
        self._beat = Beat(0)
        self._beat_at = 0.0
        self._claimed_at = 0.0
        self._plan: Plan | None = None
        self._answers: dict[str, Ready] = {}
        """Of the nodes that are ready for the plan."""
        self._complete = False
        self._roster = Roster(0, 0, ())
        self._roster_at: float | None = None

    @property
    def alive(self) -> dict[str, Member]:
        """This launcher and those it hears of."""
        return {self._own.name: self._own} | {name: peer.member for name, peer in self.peers.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Of the nodes of those that are alive, how many ranks each has."""
        return {self._own.name: self._size} | {name: peer.size for name, peer in self.peers.items()}

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats."""
        return interval_s(len(self.body))

    @property
    def _timeout_s(self) -> float:
        return max(self._timeout, BEATS_MISSED * self.interval_s)

    def begin(self, near: Iterable[tuple[Member, int, str]], now: float) -> None:
        """Lead those that have just answered, with the size and the process of each."""
        self.peers = {
            member.name: Follower(member, now, size=size, incarnation=incarnation, orders=Outbox(self._ordered + 1))
            for member, size, incarnation in near
        }
        self.body = self.alive

    # -- the plan ------------------------------------------------------------------------------------------------

    def claimed(self, plan: Plan, now: float) -> None:
        """``plan`` is the newest; its nodes are to be ready."""
        self._plan, self._answers, self._complete = plan, {}, False
        self._claimed_at = now
        self.say(Beat(plan.number), now)
        self._note_change(now)

    def say(self, beat: Beat, now: float) -> None:
        """Tell everybody at once."""
        self._beat, self._beat_at = beat, now + self.interval_s
        for peer in (*self.peers.values(), *self._coming.values()):
            self._send(peer.member, beat)

    def ready(self, name: str, answer: Ready) -> Begun | None:
        """The node ``name`` is ready for the plan. With the last of its nodes: what they all begin with."""
        self._answers[name] = answer
        plan = self._plan
        if plan is None or self._complete or self._beat.begun is not None or not plan.slots:
            return None
        if not self._answers.keys() >= set(plan.slots):
            return None
        self._complete = True
        first, answers = plan.slots[0], self._answers.values()
        furthest, committed = highest(one.furthest for one in answers), highest(one.committed for one in answers)
        return Begun(self.alive[first].address, self._answers[first].port, furthest, committed)

    def begun(self, begun: Begun, now: float) -> None:
        """The plan holds: let all begin."""
        if self._plan is not None:
            self.say(Beat(self._plan.number, begun), now)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self._beat_at:
            self.say(self._beat, now)
        self._coming = {name: peer for name, peer in self._coming.items() if now - peer.heard < self._timeout_s}
        if self._roster_at is not None and now >= self._roster_at:
            self._tell_roster(now)

    def forgive(self, stall_s: float) -> None:
        """This launcher was held up for so long."""
        for peer in self.peers.values():
            peer.heard += stall_s

    def unready(self, now: float) -> list[str]:
        """Nodes of the plan that all others have been waiting for too long."""
        plan = self._plan
        if plan is None or self._complete or now - self._claimed_at < READY_LIMIT_S:
            return []
        waiting = [name for name in plan.slots if name in self.peers and name not in self._answers]
        if not waiting or self._own.name not in self._answers or len(waiting) == len(plan.slots):
            return []
        self._claimed_at = now
        return waiting

    def silent(self, now: float) -> list[str] | None:
        """Those that are lost. None if it is this side that has lost the others.

        Whether it has is judged by the usual timeout, whatever patience single ones have earned: after that the others
        may go on without this side. While it is open, because many have just fallen silent, nobody is lost.
        """
        limit_s = self._timeout_s
        late = {name: peer for name, peer in self.peers.items() if now - peer.heard > limit_s / 2}
        overdue = [name for name, peer in late.items() if now - peer.heard > limit_s]
        if not overdue:
            return []
        if self._share_without(overdue) is Share.MINORITY:
            return None
        silent = [name for name in overdue if late[name].silence(now, limit_s) is not None]
        return silent if silent and self._share_without(late) is not Share.MINORITY else []

    def _share_without(self, names: Iterable[str]) -> Share:
        return share(self.alive.keys() - set(names), self.body)

    def lose(self, name: str, now: float) -> float | None:
        """Lead ``name`` no longer. Returns for how long it has been silent, None if it was not led."""
        peer = self.peers.pop(name, None)
        if peer is None:
            return None
        self.body.pop(name, None)
        self._answers.pop(name, None)
        self._note_change(now)
        return max(0.0, now - peer.heard)

    # -- the others ----------------------------------------------------------------------------------------------

    def join(self, sender: Member, now: float) -> None:
        """Somebody wants to be led; it counts once it has answered a heartbeat."""
        if sender.name not in self.peers:
            self._coming.setdefault(sender.name, Follower(sender, now)).heard = now
        self._send(sender, self._beat)

    def is_successor(self, sender: Member, message: Here) -> bool:
        """Whether its process is another one: whatever ran there has ended with the old."""
        peer = self.peers.get(sender.name)
        return peer is not None and peer.incarnation not in ("", message.incarnation)

    def here(self, sender: Member, message: Here, now: float) -> bool:
        """Somebody has answered a heartbeat. Returns whether it is led only from now on."""
        joined = sender.name not in self.peers
        if joined:
            peer = self.peers[sender.name] = self._coming.pop(sender.name, Follower(sender, now))
            peer.orders = Outbox(self._ordered + 1)
            self.body[sender.name] = sender
            self._note_change(now)
        peer = self.peers[sender.name]
        peer.hear(now, self.interval_s)
        peer.incarnation, peer.size, peer.roster = message.incarnation, message.size, message.roster
        peer.orders.confirm(message.orders)
        if peer.due(now):
            for parcel in peer.orders.again():
                self._send(sender, Order(*parcel))
            if peer.roster < self._roster.version and self._roster_at is None:
                self._send(sender, self._roster)
        return joined

    def awaits(self, sender: Member, message: Here) -> bool:
        """Whether it says for the first time that it is ready for the newest plan."""
        return message.number == self._beat.number and sender.name not in self._answers

    def tell(self, sender: Member, message: Tell) -> Body | None:
        """Somebody says something; returns what, if it has not been heard before."""
        peer = self.peers.get(sender.name)
        if peer is None:
            return None
        body = peer.tells.take(message.number, message.oldest, message.body)
        self._send(sender, Told(peer.tells.heard))
        return body

    def order(self, body: Body) -> None:
        """Say something to all."""
        self._ordered += 1
        for peer in self.peers.values():
            self._send(peer.member, Order(*peer.orders.add(body)))

    def _note_change(self, now: float) -> None:
        """Somebody has come or gone."""
        if self._roster_at is None:
            self._roster_at = now + ROSTER_S

    def _tell_roster(self, now: float) -> None:
        self._roster_at = None
        self.body = self.alive
        number, plan = self._beat.number, self._plan
        if plan is not None and self._roster.number != number and {*plan.members} == {*self.body.values()}:
            self._roster = Roster(number, 0, ())  # who obeys the claim has read as much in it
            return
        self._roster = Roster(number, self._roster.version + 1, tuple(self.body.values()))
        for peer in self.peers.values():
            self._send(peer.member, self._roster)


def highest(steps: Iterable[int | None]) -> int | None:
    """The highest step that somebody knows, None if nobody does."""
    return max((step for step in steps if step is not None), default=None)
