"""The side of a launcher that is led: the head it hears of, what it has to say to it, and what it has heard from it."""

from __future__ import annotations

from collections.abc import Callable

from opsd.launch.claims.leading import BEATS_MISSED, LEAST_INTERVAL_S, REPEAT_S
from opsd.launch.claims.mail import Inbox, Outbox
from opsd.launch.claims.messages import Here, Join, Message, Order, Ready, Tell
from opsd.launch.claims.peers import Peer
from opsd.launch.claims.port import Body
from opsd.launch.io.protocol import Member

JOIN_S = 0.3


class Following:
    """While there is a head, or while one is waited for. What it is told is kept until a head has confirmed it."""

    def __init__(
        self, size: int, launcher: str, send: Callable[[Member, Message], None], timeout_s: float, now: float
    ) -> None:
        self.head: Member | None = None
        """The one that is followed, whether it has been heard of or not."""
        self.ready: Ready | None = None
        self.roster = 0
        """The newest of the head's lists that is known here."""
        self.heard = now
        """When a head was heard of last."""
        self._size = size
        self._launcher = launcher
        self._send = send
        self._timeout = timeout_s
        self._interval = LEAST_INTERVAL_S
        self._peer: Peer | None = None
        self._joined_at = -1e9
        self._tells = Outbox()
        self._orders = Inbox()

    def begin(self, head: Member, now: float, number: int) -> None:
        """Follow ``head``, which has claimed ``number``."""
        if self.head != head:
            self.head, self._peer, self._orders, self.roster = head, Peer(head, now), Inbox(), 0
            self.join(now, number)

    def end(self) -> None:
        """Follow nobody."""
        self.head = self._peer = None

    def forgive(self, stall_s: float) -> None:
        """This launcher was held up for so long."""
        if self._peer is not None:
            self._peer.heard += stall_s

    def silent(self, now: float) -> bool:
        """Whether nothing is heard of the head for too long."""
        return self._peer is not None and self._peer.silence(now, self._timeout_s) is not None

    def hears(self, now: float) -> bool:
        """Whether the head was heard of within the usual timeout."""
        return self._peer is not None and now - self._peer.heard < self._timeout_s

    @property
    def _timeout_s(self) -> float:
        return max(self._timeout, BEATS_MISSED * self._interval)

    def join(self, now: float, number: int) -> None:
        """Ask the head to lead this launcher too, some times a second."""
        if self.head is not None and now - self._joined_at >= JOIN_S:
            self._joined_at = now
            self._send(self.head, Join(number))

    def hear(self, now: float, interval_s: float, *, new: bool) -> None:
        """A heartbeat of the head; ``new``: the first after a silence. What it has not confirmed is said again."""
        assert self._peer is not None
        self._interval = interval_s
        self._peer.hear(now, interval_s)
        self.heard = now
        if self._peer.due(now, REPEAT_S) or new:
            for parcel in self._tells.again():
                self._send(self._peer.member, Tell(*parcel))

    def answer(self, head: Member, number: int) -> None:
        """Answer a heartbeat."""
        self._send(head, Here(number, self._size, self._launcher, self.ready, self._orders.heard, self.roster))

    def tell(self, body: Body, *, now_heard: bool) -> None:
        """Say something to the head, and keep it; sent at once if one is ``now_heard``."""
        parcel = self._tells.add(body)
        if now_heard and self.head is not None:
            self._send(self.head, Tell(*parcel))

    def confirmed(self, number: int) -> None:
        """The head has heard everything up to message ``number``."""
        self._tells.confirm(number)

    def take_tells(self) -> tuple[Body, ...]:
        """What no head has confirmed, for this launcher as the head."""
        waiting = self._tells.waiting
        self._tells.confirm(self._tells.last)
        return waiting

    def take(self, order: Order) -> Body | None:
        """An order of the head, if it is the next one."""
        return self._orders.take(order.number, order.oldest, order.body)
