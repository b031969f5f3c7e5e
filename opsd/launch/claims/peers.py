"""Other launchers as this one hears them: how long they may be silent, and what is said again until it is confirmed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from opsd.launch.claims.messages import Body, Here, Join, Message, Order, Ready, Tell
from opsd.launch.io.protocol import Member

LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 0.8
BEATS_PER_SECOND = 1280
"""Heartbeats a second that the leader of many launchers is up to; beyond that they become rarer."""
BEATS_MISSED = 2.5
"""Where heartbeats are rare, at least so many intervals of silence are a loss."""
REPEAT_S = 1.0
"""What may have been lost is said again after this."""
JOIN_S = 0.3
PATIENCE = 3.0
"""Times its own worst recent delay a launcher may be silent …"""
MOST_PATIENCE = 4.0
"""… up to so many times the usual timeout: a node that answers slowly is not a dead node."""
_FORGET = 0.998

Parcel = tuple[int, int, Body]
"""A message as it travels: its number, that of the oldest one which is not confirmed, and itself."""


@dataclass(slots=True)
class Outbox:
    """Messages for somebody, numbered from ``next`` on and kept until they are confirmed."""

    next: int = 1
    _waiting: deque[tuple[int, Body]] = field(default_factory=deque)

    def add(self, body: Body) -> Parcel:
        """Keep a message; returns how it travels."""
        self._waiting.append((self.next, body))
        self.next += 1
        return self.next - 1, self._waiting[0][0], body

    def confirm(self, number: int) -> None:
        """Everything up to ``number`` has arrived."""
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.popleft()

    def take_all(self) -> tuple[Body, ...]:
        """What has not been confirmed, oldest first; it counts as confirmed from now on."""
        bodies = tuple(body for _, body in self._waiting)
        self._waiting.clear()
        return bodies

    def again(self) -> Iterator[Parcel]:
        """All that has not been confirmed, as it travels."""
        for number, body in tuple(self._waiting):
            yield number, self._waiting[0][0], body


@dataclass(slots=True)
class Inbox:
    """What has been heard of somebody."""

    heard: int = 0
    """The number of the last message."""

    def take(self, number: int, oldest: int, body: Body) -> Body | None:
        """The message if it is the next one; those before the sender's oldest were heard by somebody else."""
        if number != max(self.heard + 1, oldest):
            return None
        self.heard = number
        return body


@dataclass(slots=True)
class Peer:
    """Another launcher that is being heard of; times on the monotonic clock of this one."""

    member: Member
    heard: float
    worst_delay: float = 0.0
    """Of what came, beyond the usual interval."""
    repeated: float = 0.0
    """When it was last sent again what it has not confirmed."""

    def hear(self, now: float, interval_s: float) -> None:
        """Something has come from it, at the latest expected after ``interval_s``."""
        self.worst_delay = max(self.worst_delay * _FORGET, now - self.heard - interval_s)
        self.heard = now

    def silence(self, now: float, usual_s: float) -> float | None:
        """For how long it has been silent if that is too long, else None."""
        allowed = min(MOST_PATIENCE * usual_s, usual_s + PATIENCE * max(0.0, self.worst_delay - usual_s / 3))
        silent = now - self.heard
        return silent if silent > allowed else None

    def due(self, now: float) -> bool:
        """True once in a while: what it has not confirmed is to be sent again."""
        if now - self.repeated < REPEAT_S:
            return False
        self.repeated = now
        return True


@dataclass(slots=True)
class Follower(Peer):
    """One that this launcher leads. ``size`` is how many ranks its node has, ``incarnation`` names its process."""

    size: int = 0
    incarnation: str = ""
    roster: int = 0
    """The newest list of launchers that it has."""
    orders: Outbox = field(default_factory=Outbox)
    tells: Inbox = field(default_factory=Inbox)


class Following:
    """The leader that this launcher follows or waits for. Messages to it are kept until a leader has confirmed them."""

    def __init__(
        self, size: int, launcher: str, send: Callable[[Member, Message], None], timeout_s: float, now: float
    ) -> None:
        self.leader: Member | None = None
        """The one that is followed, whether it has been heard of or not."""
        self.ready: Ready | None = None
        self.roster = 0
        """The newest of the leader's lists that is known here."""
        self.heard = now
        """When a leader was heard of last."""
        self.tells = Outbox()
        self._size = size
        self._launcher = launcher
        self._send = send
        self._timeout = timeout_s
        self._interval = LEAST_INTERVAL_S
        self._peer: Peer | None = None
        self._joined_at = -1e9
        self._orders = Inbox()

    def begin(self, leader: Member, now: float, number: int) -> None:
        """Follow ``leader``, which has claimed ``number``."""
        if self.leader != leader:
            self.leader, self._peer, self._orders, self.roster = leader, Peer(leader, now), Inbox(), 0
            self.join(now, number)

    def end(self) -> None:
        """Follow nobody."""
        self.leader = self._peer = None

    def forgive(self, stall_s: float) -> None:
        """This launcher was held up for so long."""
        if self._peer is not None:
            self._peer.heard += stall_s

    def silent(self, now: float) -> bool:
        """Whether nothing is heard of the leader for too long."""
        return self._peer is not None and self._peer.silence(now, self._timeout_s) is not None

    def hears(self, now: float) -> bool:
        """Whether the leader was heard of within the usual timeout."""
        return self._peer is not None and now - self._peer.heard < self._timeout_s

    @property
    def _timeout_s(self) -> float:
        return max(self._timeout, BEATS_MISSED * self._interval)

    def join(self, now: float, number: int) -> None:
        """Ask the leader to lead this launcher too, some times a second."""
        if self.leader is not None and now - self._joined_at >= JOIN_S:
            self._joined_at = now
            self._send(self.leader, Join(number))

    def hear(self, now: float, interval_s: float, *, new: bool) -> None:
        """A heartbeat of the leader; ``new``: the first after a silence. What it has not confirmed is said again."""
        assert self._peer is not None
        self._interval = interval_s
        self._peer.hear(now, interval_s)
        self.heard = now
        if self._peer.due(now) or new:
            for parcel in self.tells.again():
                self._send(self._peer.member, Tell(*parcel))

    def answer(self, leader: Member, number: int) -> None:
        """Answer a heartbeat."""
        self._send(leader, Here(number, self._size, self._launcher, self.ready, self._orders.heard, self.roster))

    def tell(self, body: Body, *, now_heard: bool) -> None:
        """Say something to the leader, and keep it; sent at once if one is ``now_heard``."""
        parcel = self.tells.add(body)
        if now_heard and self.leader is not None:
            self._send(self.leader, Tell(*parcel))

    def take(self, order: Order) -> Body | None:
        """An order of the leader, if it is the next one."""
        return self._orders.take(order.number, order.oldest, order.body)


class Share(Enum):
    """What part of a body of launchers some of them are."""

    MINORITY = 0
    HALF = 1
    MAJORITY = 2


def share(some: Collection[str], body: Iterable[str]) -> Share:
    """Which part of ``body`` is among ``some``."""
    names = set(body)
    twice = 2 * len(names.intersection(some))
    return Share.MAJORITY if twice > len(names) else Share.HALF if twice == len(names) else Share.MINORITY


def interval_s(launchers: int) -> float:
    """Seconds between two heartbeats of the leader of so many."""
    return min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, launchers / BEATS_PER_SECOND))
