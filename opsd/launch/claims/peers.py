"""Failure detection for peers, mailboxes with confirmation, and the follower's connection to its leader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

from opsd.launch.claims.messages import Body, Broadcast, HeartbeatReply, Join, LeaderMail, Message, Ready
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
