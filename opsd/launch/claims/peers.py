"""What a launcher knows of another one: when it was last heard of, and how long its silence may last."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from opsd.launch.claims.mail import Inbox, Outbox
from opsd.launch.claims.messages import Ready
from opsd.launch.io.protocol import Member

PATIENCE = 3.0
"""Times its own worst recent delay a launcher may be silent …"""
MOST_PATIENCE = 4.0
"""… up to so many times the usual timeout: a node that answers slowly is not a dead node."""
_FORGET = 0.998


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

    def due(self, now: float, every_s: float) -> bool:
        """True once in a while: what it has not confirmed is to be sent again."""
        if now - self.repeated < every_s:
            return False
        self.repeated = now
        return True


@dataclass(slots=True)
class Follower(Peer):
    """One that this launcher leads. ``size`` is how many ranks its node has, ``incarnation`` names its process."""

    size: int = 0
    incarnation: str = ""
    ready: Ready | None = None
    roster: int = 0
    """The newest list of launchers that it has."""
    orders: Outbox = field(default_factory=Outbox)
    tells: Inbox = field(default_factory=Inbox)


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
