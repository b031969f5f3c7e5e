"""Who is there: peers and how long they are waited for, and the followers of a leader.

Failure detection for peers, mailboxes with confirmation, and the follower's connection to its leader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import (
    Begun,
    Body,
    Broadcast,
    Claimed,
    Heartbeat,
    HeartbeatReply,
    Join,
    LeaderMail,
    LeaderMailAck,
    MemberChanges,
    MemberList,
    Message,
    Ready,
)
from opsd.launch.io.protocol import Member

LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 0.8
BEATS_PER_SECOND = 1280
"""Heartbeats per second that a leader sends at most; with more launchers each gets fewer."""
BEATS_MISSED = 2.5
"""The timeout is at least this many heartbeat intervals."""
REPEAT_S = 1.0
"""Unconfirmed messages are sent again after this."""
JOIN_S = 0.3
PATIENCE = 3.0
"""The timeout of a peer grows with its worst recent delay, times this …"""
MOST_PATIENCE = 4.0
"""… up to this multiple of the usual timeout: a slow node is not a dead node."""
_FORGET = 0.998

Envelope = tuple[int, int, Body]
"""A message in transit: its number, the number of the oldest unconfirmed one, and its content."""


@dataclass(slots=True)
class Outbox:
    """Messages to one receiver, numbered from ``next`` on and kept until they are confirmed."""

    next: int = 1
    _waiting: deque[tuple[int, Body]] = field(default_factory=deque)

    def add(self, body: Body) -> Envelope:
        """Keep a message; returns its envelope."""
        self._waiting.append((self.next, body))
        self.next += 1
        return self.next - 1, self._waiting[0][0], body

    def confirm(self, number: int) -> None:
        """All messages up to ``number`` have arrived."""
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.popleft()

    def take_all(self) -> tuple[Body, ...]:
        """Remove and return the unconfirmed messages, oldest first."""
        bodies = tuple(body for _, body in self._waiting)
        self._waiting.clear()
        return bodies

    def unconfirmed(self) -> Iterator[Envelope]:
        """The envelopes of all unconfirmed messages."""
        for number, body in tuple(self._waiting):
            yield number, self._waiting[0][0], body


@dataclass(slots=True)
class Inbox:
    """Messages from one sender."""

    heard: int = 0
    """The number of the last message."""

    def take(self, number: int, oldest: int, body: Body) -> Body | None:
        """The message if it is the next one; those before the sender's oldest went to another leader."""
        if number != max(self.heard + 1, oldest):
            return None
        self.heard = number
        return body


@dataclass(slots=True)
class Peer:
    """Failure detector for another launcher; times on this launcher's monotonic clock."""

    member: Member
    heard: float
    worst_delay: float = 0.0
    """The worst recent delay beyond the usual interval, in seconds; it decays with every message."""
    repeated: float = 0.0
    """When unconfirmed messages were last sent again."""

    def hear(self, now: float, interval_s: float) -> None:
        """A message has come, expected after at most ``interval_s``."""
        self.worst_delay = max(self.worst_delay * _FORGET, now - self.heard - interval_s)
        self.heard = now

    def silence(self, now: float, usual_s: float) -> float | None:
        """For how many seconds it has been silent if that exceeds its timeout, else None."""
        allowed = min(MOST_PATIENCE * usual_s, usual_s + PATIENCE * max(0.0, self.worst_delay - usual_s / 3))
        silent = now - self.heard
        return silent if silent > allowed else None

    def resend_due(self, now: float) -> bool:
        """True every ``REPEAT_S``: unconfirmed messages should be sent again."""
        if now - self.repeated < REPEAT_S:
            return False
        self.repeated = now
        return True


@dataclass(slots=True)
class Follower(Peer):
    """A launcher that this one leads. ``size`` is the number of its ranks, ``incarnation`` identifies its process."""

    size: int = 0
    incarnation: str = ""
    members_version: int = 0
    """The newest member list that it has."""
    broadcasts: Outbox = field(default_factory=Outbox)
    mail: Inbox = field(default_factory=Inbox)


class LeaderClient:
    """The leader that this launcher follows or waits for. Messages to it are kept until a leader has confirmed them."""

    def __init__(
        self, size: int, launcher: str, send: Callable[[Member, Message], None], timeout_s: float, now: float
    ) -> None:
        self.leader: Member | None = None
        """The leader that is followed, whether it has been heard from or not."""
        self.ready: Ready | None = None
        self.members_version = 0
        """The newest member list received."""
        self.heard = now
        """When any leader was heard from last."""
        self.mail = Outbox()
        self._size = size
        self._launcher = launcher
        self._send = send
        self._timeout = timeout_s
        self._interval = LEAST_INTERVAL_S
        self._peer: Peer | None = None
        self._joined_at = -1e9
        self._broadcasts = Inbox()

    def begin(self, leader: Member, now: float, number: int) -> None:
        """Follow ``leader``, which has claimed ``number``."""
        if self.leader != leader:
            self.leader, self._peer, self._broadcasts, self.members_version = leader, Peer(leader, now), Inbox(), 0
            self.join(now, number)

    def end(self) -> None:
        """Follow nobody."""
        self.leader = self._peer = None

    def discount_stall(self, stall_s: float) -> None:
        """This launcher was held up for so long: silence during that time does not count."""
        if self._peer is not None:
            self._peer.heard += stall_s

    def silent(self, now: float) -> bool:
        """Whether the leader has exceeded its timeout."""
        return self._peer is not None and self._peer.silence(now, self._timeout_s) is not None

    def hears(self, now: float) -> bool:
        """Whether the leader was heard from within the usual timeout."""
        return self._peer is not None and now - self._peer.heard < self._timeout_s

    @property
    def _timeout_s(self) -> float:
        return max(self._timeout, BEATS_MISSED * self._interval)

    def join(self, now: float, number: int) -> None:
        """Ask the leader to take this launcher in, every ``JOIN_S``."""
        if self.leader is not None and now - self._joined_at >= JOIN_S:
            self._joined_at = now
            self._send(self.leader, Join(number))

    def hear(self, now: float, interval_s: float, *, new: bool) -> None:
        """A heartbeat of the leader; ``new``: the first after a silence. Unconfirmed mail is sent again."""
        assert self._peer is not None
        self._interval = interval_s
        self._peer.hear(now, interval_s)
        self.heard = now
        if self._peer.resend_due(now) or new:
            for envelope in self.mail.unconfirmed():
                self._send(self._peer.member, LeaderMail(*envelope))

    def answer(self, leader: Member, number: int) -> None:
        """Answer a heartbeat."""
        self._send(
            leader,
            HeartbeatReply(
                number, self._size, self._launcher, self.ready, self._broadcasts.heard, self.members_version
            ),
        )

    def tell(self, body: Body, *, now_heard: bool) -> None:
        """Queue mail to the leader; sent at once if one is ``now_heard``."""
        envelope = self.mail.add(body)
        if now_heard and self.leader is not None:
            self._send(self.leader, LeaderMail(*envelope))

    def take(self, broadcast: Broadcast) -> Body | None:
        """A broadcast of the leader, if it is the next one."""
        return self._broadcasts.take(broadcast.number, broadcast.oldest, broadcast.body)


class Quorum(Enum):
    """How large a part of an electorate is."""

    MINORITY = 0
    HALF = 1
    MAJORITY = 2


def quorum(some: Collection[str], body: Collection[str], without: Collection[str] = ()) -> Quorum:
    """How much of ``body`` is in ``some``, leaving out ``without``; takes time by the size of those two."""
    left = set(without)
    twice = 2 * sum(name in body for name in {*some} - left)
    whole = len(body) - sum(name in body for name in left)
    return Quorum.MAJORITY if twice > whole else Quorum.HALF if twice == whole else Quorum.MINORITY


def interval_s(launchers: int) -> float:
    """Seconds between two heartbeats of the leader of so many."""
    return min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, launchers / BEATS_PER_SECOND))


# The leader's side: heartbeats, which followers are alive and ready, and messages to all of them.


MEMBER_LIST_S = 0.2
"""Delay before a change of members is sent to all, so that several changes go together."""
READY_LIMIT_S = 90.0
"""A node that answers but has not ended its ranks for so long is given up, once all others are ready."""


class FollowerTracker:
    """Tracks the followers while this launcher leads. ``send`` may lose messages."""

    def __init__(self, own: Member, size: int, send: Callable[[Member, Message], None], timeout_s: float) -> None:
        self.peers: dict[str, Follower] = {}
        self.alive: dict[str, Member] = {own.name: own}
        """This launcher and the ``peers``; kept, because it is asked for with each message of thousands."""
        self.electorate: dict[str, Member] = {}
        """All members as of the last agreement: half of them or more are needed to go on."""
        self._own = own
        self._size = size
        self._send = send
        self._timeout = timeout_s
        self._coming: dict[str, Follower] = {}
        self._broadcast_count = 0
        """Numbers are never reused: a follower that is taken in again may have received the earlier ones."""
        self._heartbeat = Heartbeat(0)
        self._heartbeat_at = 0.0
        self._claimed_at = 0.0
        self._plan: Plan | None = None
        self._changes: Claimed | None = None
        """The changes in the claim of the plan."""
        self._answers: dict[str, Ready] = {}
        """The nodes that are ready for the plan …"""
        self._awaited: set[str] = set()
        """… and those with ranks that are not yet."""
        self._complete = False
        self._news: MemberList | MemberChanges = MemberList(0, 0, ())
        """Of the members, as last sent to all."""
        self._news_at: float | None = None
        self._news_sent_at = 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks on each live node."""
        return {self._own.name: self._size} | {name: peer.size for name, peer in self.peers.items()}

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats."""
        return interval_s(len(self.electorate))

    @property
    def _timeout_s(self) -> float:
        return max(self._timeout, BEATS_MISSED * self.interval_s)

    def begin(self, reachable: Iterable[tuple[Member, int, str]], now: float) -> None:
        """Start to lead the launchers that have just answered, each with its size and incarnation."""
        self.peers = {
            member.name: Follower(
                member, now, size=size, incarnation=incarnation, broadcasts=Outbox(self._broadcast_count + 1)
            )
            for member, size, incarnation in reachable
        }
        self.alive = {self._own.name: self._own} | {name: peer.member for name, peer in self.peers.items()}
        self.electorate = dict(self.alive)

    # -- the plan ------------------------------------------------------------------------------------------------

    def claimed(self, plan: Plan, now: float, changes: Claimed | None = None) -> None:
        """``plan`` is the newest; its nodes must become ready. ``changes`` tells them its claim."""
        self._plan, self._answers, self._awaited, self._complete = plan, {}, set(plan.slots), False
        self._claimed_at = now
        self._changes = changes
        if changes is not None:
            for peer in self.peers.values():
                self._send(peer.member, changes)
        self.send_heartbeat(Heartbeat(plan.number), now)
        self._note_change(now)

    def tell_claim(self, sender: Member, number: int) -> None:
        """Tell a launcher that knows generation ``number`` of the newest claim, if it came too late to be told."""
        if self._changes is not None and number < self._changes.number:
            self._send(sender, self._changes)

    def send_heartbeat(self, beat: Heartbeat, now: float) -> None:
        self._heartbeat, self._heartbeat_at = beat, now + self.interval_s
        for peer in (*self.peers.values(), *self._coming.values()):
            self._send(peer.member, beat)

    def ready(self, name: str, answer: Ready) -> Begun | None:
        """The node ``name`` is ready for the plan. With the last node: the message with which all begin."""
        self._answers[name] = answer
        self._awaited.discard(name)
        plan = self._plan
        if plan is None or self._complete or self._heartbeat.begun is not None or not plan.slots:
            return None
        if self._awaited:
            return None
        self._complete = True
        first, answers = plan.slots[0], self._answers.values()
        furthest, committed = highest(one.furthest for one in answers), highest(one.committed for one in answers)
        return Begun(self.alive[first].host, self._answers[first].port, furthest, committed)

    def begun(self, begun: Begun, now: float) -> None:
        """Let all begin."""
        if self._plan is not None:
            self.send_heartbeat(Heartbeat(self._plan.number, begun), now)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Advance the time."""
        if now >= self._heartbeat_at:
            self.send_heartbeat(self._heartbeat, now)
        self._coming = {name: peer for name, peer in self._coming.items() if now - peer.heard < self._timeout_s}
        if self._news_at is not None and now >= self._news_at:
            self._send_news(now)

    def discount_stall(self, stall_s: float) -> None:
        """This launcher was held up for so long: silence during that time does not count."""
        for peer in self.peers.values():
            peer.heard += stall_s

    def unready(self, now: float) -> list[str]:
        """Nodes of the plan for which all others have waited too long."""
        plan = self._plan
        if plan is None or self._complete or now - self._claimed_at < READY_LIMIT_S:
            return []
        waiting = [name for name in plan.slots if name in self.peers and name not in self._answers]
        if not waiting or self._own.name not in self._answers or len(waiting) == len(plan.slots):
            return []
        self._claimed_at = now
        return waiting

    def silent(self, now: float) -> list[str] | None:
        """The followers that are lost. None if this launcher has lost the majority.

        The majority is judged by the usual timeout, whatever extra time single followers have earned: after that the
        others may go on without this side. While many have just fallen silent and the majority is in doubt, nobody is
        declared lost.
        """
        limit_s = self._timeout_s
        late = {name: peer for name, peer in self.peers.items() if now - peer.heard > limit_s / 2}
        overdue = [name for name, peer in late.items() if now - peer.heard > limit_s]
        if not overdue:
            return []
        if self._quorum_without(overdue) is Quorum.MINORITY:
            return None
        silent = [name for name in overdue if late[name].silence(now, limit_s) is not None]
        return silent if silent and self._quorum_without(late) is not Quorum.MINORITY else []

    def _quorum_without(self, names: Iterable[str]) -> Quorum:
        return quorum(self.alive.keys() - set(names), self.electorate)

    def drop(self, name: str, now: float) -> float | None:
        """Stop leading ``name``. Returns for how many seconds it was silent, None if it was not a follower."""
        peer = self.peers.pop(name, None)
        if peer is None:
            return None
        self.alive.pop(name, None)
        self.electorate.pop(name, None)
        if self._answers.pop(name, None) is not None and self._plan is not None and name in self._plan.slots:
            self._awaited.add(name)
        self._note_change(now)
        return max(0.0, now - peer.heard)

    # -- the others ----------------------------------------------------------------------------------------------

    def join(self, sender: Member, now: float) -> None:
        """A launcher wants to follow; it counts once it has answered a heartbeat."""
        if sender.name not in self.peers:
            self._coming.setdefault(sender.name, Follower(sender, now)).heard = now
        self._send(sender, self._heartbeat)

    def is_new_process(self, sender: Member, message: HeartbeatReply) -> bool:
        """Whether the sender is another process than before: the ranks of the old one have ended."""
        peer = self.peers.get(sender.name)
        return peer is not None and peer.incarnation not in ("", message.incarnation)

    def handle_reply(self, sender: Member, message: HeartbeatReply, now: float) -> bool:
        """A launcher has answered a heartbeat. Returns whether it is a new follower."""
        joined = sender.name not in self.peers
        if joined:
            peer = self.peers[sender.name] = self._coming.pop(sender.name, Follower(sender, now))
            peer.broadcasts = Outbox(self._broadcast_count + 1)
            self.alive[sender.name] = self.electorate[sender.name] = peer.member
            self._note_change(now)
        peer = self.peers[sender.name]
        peer.hear(now, self.interval_s)
        peer.incarnation, peer.size, peer.members_version = message.incarnation, message.size, message.members_version
        peer.broadcasts.confirm(message.broadcasts)
        if peer.resend_due(now):
            for envelope in peer.broadcasts.unconfirmed():
                self._send(sender, Broadcast(*envelope))
            if peer.members_version < self._news.version and now - self._news_sent_at >= REPEAT_S:
                self._send(sender, self._news)
        return joined

    def awaits(self, sender: Member, message: HeartbeatReply) -> bool:
        """Whether the sender reports for the first time that it is ready for the newest plan."""
        return message.number == self._heartbeat.number and sender.name not in self._answers

    def take_mail(self, sender: Member, message: LeaderMail) -> Body | None:
        """Confirm mail from a follower; returns its content unless it is a duplicate."""
        peer = self.peers.get(sender.name)
        if peer is None:
            return None
        body = peer.mail.take(message.number, message.oldest, message.body)
        self._send(sender, LeaderMailAck(peer.mail.heard))
        return body

    def broadcast(self, body: Body) -> None:
        """Send ``body`` to all followers, until each has confirmed it."""
        self._broadcast_count += 1
        for peer in self.peers.values():
            self._send(peer.member, Broadcast(*peer.broadcasts.add(body)))

    def _note_change(self, now: float) -> None:
        if self._news_at is None:
            self._news_at = now + MEMBER_LIST_S

    def _send_news(self, now: float) -> None:
        self._news_at = None
        self.electorate = dict(self.alive)
        number, plan = self._heartbeat.number, self._plan
        if plan is not None and self._news.number != number and {*plan.members} == {*self.electorate.values()}:
            self._news = MemberList(number, 0, ())  # who obeys the claim has read as much in it
            return
        listed = MemberList(number, self._news.version + 1, tuple(self.electorate.values()))
        self._news = listed if plan is None else _changes(plan, listed)
        self._news_sent_at = now
        for peer in self.peers.values():
            self._send(peer.member, self._news)


def _changes(plan: Plan, news: MemberList) -> MemberChanges:
    """How the members have changed since they were those of ``plan``."""
    before, there = {*plan.members}, {member.name for member in news.members}
    joined = tuple(member for member in news.members if member not in before)
    left = tuple(member.name for member in plan.members if member.name not in there)
    return MemberChanges(news.number, news.version, joined, left)


def highest(steps: Iterable[int | None]) -> int | None:
    """The highest of the known steps, None if none is known."""
    return max((step for step in steps if step is not None), default=None)
