"""Connections to the other launchers, made when there is something to send, and kept.

Connections that are not authenticated yet: limited in number, and the idle ones are closed first.

They must not use up the file descriptors that the launcher needs for its own work.
"""

from __future__ import annotations

import errno
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from ipaddress import ip_address

from opsd.launch.io.connection import GREETING_S, Connection, RateLimit, encode
from opsd.launch.io.handshake import AddressBook, Identity, Superseded, WireError, lookup
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import JsonMessage, Member, ProtocolError

SILENT_PER_ADDRESS = 4
"""Silent connections per address; a launcher greets as soon as it is connected."""
OWN_DESCRIPTORS = 512
"""Descriptors that a launcher needs besides its connections: the pipes, logs and pidfds of its ranks."""
_KEPT = 64
_MOST = 64


class UnauthenticatedConnections:
    """In order of arrival. A new connection is accepted; if there are too many, the oldest silent one is closed for it.

    ``launchers`` returns the size of the run: that many more may be authenticating, since all launchers connect at once
    when this one begins to lead.
    """

    def __init__(self, launchers: Callable[[], int]) -> None:
        self._launchers = launchers
        self._all: dict[Connection, str] = {}

    def add(self, connection: Connection, address: str) -> bool:
        """Add a connection; False if another one was closed for it."""
        leaving = self._leaving(address)
        self._all[connection] = address
        if leaving is not None:
            leaving.close()
        return leaving is None

    def discard(self, connection: Connection) -> None:
        """Remove one that is authenticated or closed."""
        self._all.pop(connection, None)

    def close_silent(self) -> None:
        """Close those that have not sent anything."""
        for connection in [each for each in self._all if not each.greeted]:
            connection.close()

    def close_all(self) -> None:
        for connection in list(self._all):
            connection.close()

    def _leaving(self, address: str) -> Connection | None:
        silent = [each for each in self._all if not each.greeted]
        of_this_address = [each for each in silent if self._all[each] == address]
        if len(of_this_address) >= SILENT_PER_ADDRESS:
            return of_this_address[0]
        full = len(self._all) >= _most() + self._launchers()
        if silent and (full or len(silent) >= _most()):
            return silent[0]
        return next(iter(self._all)) if full else None


def raise_descriptor_limit(launchers: int) -> None:
    """Raise the soft limit of descriptors to what a run of that size needs: two connections per launcher."""
    needed = 2 * launchers + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def _most() -> int:
    """How many unauthenticated connections there may be: an eighth of a low limit."""
    return min(_MOST, max(1, _limit() // 8))


def is_reserved(descriptor: int) -> bool:
    """Whether a new descriptor is one of the last, reserved for the launcher. The kernel gives out the lowest."""
    limit = _limit()
    return descriptor >= limit - min(_KEPT, limit // 4)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


PROBE_S = 0.15
REFUSALS = 2
"""A launcher whose connection broke is called at once and after ``PROBE_S``; refused both times, it has ended."""
MESSAGE_INTERVAL_S = 60.0
MAX_MESSAGES = 32
"""Different messages within ``MESSAGE_INTERVAL_S``."""
BACKLOG = 4096
PAUSE_S = 1.0
"""How long no connection is accepted if there are no descriptors."""
CLOSING_S = 0.3
MOST_HELD = 16
"""Messages kept for a launcher whose address is being asked for; the oldest are dropped."""


def _ignore(member: Member, incarnation: str) -> None:
    """The default of ``opened``."""


def _later(member: Member) -> str:
    return f"another launcher {member.name}, which was started later, takes part in the run"


def _go_together(one: Connection, other: Connection) -> bool:
    """Whether two connections are to the same process, one made by each side."""
    return one.incarnation == other.incarnation and (one.expected is None) != (other.expected is None)


def _is_over(sock: socket.socket) -> bool:
    """Whether the other side has closed the connection already, as port scanners do."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class Transport:
    """Sends messages to launchers by name. Late messages are dropped; senders repeat important ones.

    ``received`` is called with every message of an authenticated launcher, in order per connection; a ProtocolError
    that it raises is printed, once a minute. ``launchers`` returns the size of the run. ``opened`` is called for each
    authenticated connection, before its first message, with the incarnation: another incarnation is another process of
    that name, and messages of the previous one are no longer delivered. Of two processes with one name the later one
    stays, and ``superseded`` is called in the other. ``unreachable`` is called when a launcher has ended, since its
    machine refuses connections. ``lookup`` finds the address of a host name; it is called in threads.
    """

    def __init__(
        self,
        own: Identity,
        loop: Loop,
        *,
        received: Callable[[Member, JsonMessage], None],
        unreachable: Callable[[str], None],
        superseded: Callable[[], None],
        print_message: Callable[[str], None],
        launchers: Callable[[], int],
        opened: Callable[[Member, str], None] = _ignore,
        lookup: Callable[[str], str] = lookup,
    ) -> None:
        self._own = own
        self._loop = loop
        self._received = received
        self._unreachable = unreachable
        self._superseded = superseded
        self._print_message = print_message
        self._opened_to = opened
        self._said: dict[str, float] = {}
        self._listener: socket.socket | None = None
        self._proven: dict[str, list[Connection]] = {}
        """At most one connection made by each side; the first is used for sending."""
        self._calling: dict[str, Connection] = {}
        self._addresses = AddressBook(loop, self._no_address, lookup)
        self._held: dict[str, deque[bytes]] = {}
        """Messages for launchers whose address is being asked for."""
        self._source = ""
        """The own address if it is one of IPv4 on loopback."""
        self._unauthenticated = UnauthenticatedConnections(launchers)
        self._rate_limits: dict[str, RateLimit] = {}
        self._refused: dict[str, int] = {}
        self._closing = self._paused = False
        self._encoded: deque[tuple[JsonMessage, bytes]] = deque(maxlen=4)

    def listen(self) -> None:
        """Raises OSError if the address or port is not available."""
        member = self._own.member
        family = socket.AF_INET6 if ":" in member.host else socket.AF_INET
        self._listener = socket.create_server((member.host, member.port), family=family, backlog=BACKLOG)
        listens = str(self._listener.getsockname()[0])
        self._source = listens if family == socket.AF_INET and ip_address(listens).is_loopback else ""
        # The kernel keeps those who connect and say nothing, for a while, without a descriptor (tcp(7)).
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(GREETING_S))
        self._listener.setblocking(False)
        self._loop.watch(self._listener.fileno(), self._accept)

    def send(self, member: Member, message: JsonMessage) -> None:
        """Send, connecting to the other launcher if necessary."""
        if (connection := self._connected_to(member.name)) is not None:
            connection.send(self._payload(message))
        elif not self._closing:
            waits = member.name in self._held
            self._held.setdefault(member.name, deque(maxlen=MOST_HELD)).append(self._payload(message))
            if not waits:
                self._addresses.find(member.host, partial(self._call, member))

    def _connected_to(self, name: str) -> Connection | None:
        """The connection that is or will be open to the launcher ``name``."""
        proven = self._proven.get(name)
        return proven[0] if proven else self._calling.get(name)

    def look_up(self, members: Iterable[Member]) -> None:
        """These may have to be called soon: ask for their addresses now, while there is time."""
        for member in members:
            self._addresses.find(member.host, lambda address: None)

    def drop(self, name: str) -> None:
        """Close all connections with a launcher without reporting it as gone. It may connect again."""
        leaving = self._proven.pop(name, [])
        if name in self._calling:
            leaving.append(self._calling.pop(name))
        self._refused.pop(name, None)
        self._held.pop(name, None)
        for connection in leaving:
            connection.close()

    def close(self) -> None:
        """Send what is queued, within ``CLOSING_S``, and close all connections."""
        self._closing = True
        if self._listener is not None:
            if not self._paused:
                self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        end = time.monotonic() + CLOSING_S
        for name in [*self._proven, *self._calling]:
            for connection in self._proven.get(name, []):
                connection.drain(max(0.0, end - time.monotonic()))
            self.drop(name)
        self._unauthenticated.close_all()

    def _payload(self, message: JsonMessage) -> bytes:
        """Encodes a message to several members once: messages are not changed after they were sent."""
        for known, payload in self._encoded:
            if known is message:
                return payload
        payload = encode(message)
        self._encoded.append((message, payload))
        return payload

    def _connection(self, sock: socket.socket, expected: Member | None) -> Connection | None:
        try:
            return Connection(
                sock, self._loop, self._own, expected=expected,
                opened=self._opened, received=self._heard, closed=self._closed,
            )  # fmt: skip
        except OSError:  # it is over before it has begun
            sock.close()
            return None

    # -- calling and being called --------------------------------------------------------------------------------

    def _call(self, member: Member, address: str | None) -> None:
        """Connect to ``member`` at ``address`` unless it has called meanwhile, and send what was held for it."""
        held = self._held.pop(member.name, ())
        connection = self._connected_to(member.name)
        if connection is None and address is not None and not self._closing:
            connection = self._connect(replace(member, listens=address))
        if connection is not None:
            for payload in held:
                connection.send(payload)

    def _connect(self, member: Member) -> Connection | None:
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in member.host else socket.AF_INET)
            if self._source:  # else many launchers on one machine would all call from one
                sock.bind((self._source, 0))
        except OSError as error:
            self._tell("sockets", f"no connection to {member.name}: {error.strerror}")
            return None
        connection = self._connection(sock, member)
        if connection is not None:
            self._calling[member.name] = connection
        return connection

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, (address, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._unauthenticated.close_silent()
                self._tell("sockets", f"no connections of other launchers: {error.strerror}; raise `ulimit -n`")
                self._pause_listening(self._listener)
            return
        if _is_over(sock):
            sock.close()
            return
        if is_reserved(sock.fileno()):
            sock.close()
            self._unauthenticated.close_silent()
            self._tell("sockets", "no connections of other launchers: too few descriptors; raise `ulimit -n`")
            return
        connection = self._connection(sock, None)
        if connection is not None and not self._unauthenticated.add(connection, address):
            self._tell("flood", f"many connections that say nothing, now from {address}; the oldest are closed")

    def _pause_listening(self, listener: socket.socket) -> None:
        """Stop accepting for a while; waiting connections would wake the loop continuously."""

        def go_on() -> None:
            if self._listener is listener:
                self._loop.watch(listener.fileno(), self._accept)
            self._paused = False

        self._paused = True
        self._loop.unwatch(listener.fileno())
        self._loop.later(PAUSE_S, go_on)

    # -- what connections say ------------------------------------------------------------------------------------

    def _opened(self, connection: Connection) -> None:
        assert connection.peer is not None
        member = connection.peer
        self._unauthenticated.discard(connection)
        if self._calling.get(member.name) is connection:
            del self._calling[member.name]
        others = self._proven.get(member.name, [])
        if any(other.incarnation > connection.incarnation for other in others):
            connection.refuse(_later(member), superseded=True)
            return
        kept = [other for other in others if _go_together(other, connection)]
        self._proven[member.name] = [*kept, connection]
        for other in others:
            if other.incarnation < connection.incarnation:
                other.refuse(_later(member), superseded=True)
            elif other not in kept:
                other.close()
        self._refused[member.name] = 0
        connection.rate_limit = self._rate_limits.setdefault(member.name, RateLimit())
        self._opened_to(member, connection.incarnation)

    def _heard(self, connection: Connection, message: JsonMessage) -> None:
        assert connection.peer is not None
        name = connection.peer.name
        try:
            self._received(connection.peer, message)
        except ProtocolError as error:
            self._tell(f"{name}: {error}", f"{name} sends {error}; it is ignored")

    def _closed(self, connection: Connection, why: Exception | None) -> None:
        self._unauthenticated.discard(connection)
        member = connection.peer or connection.expected
        if isinstance(why, WireError):
            who = f"the launcher at {member.host} ({member.name})" if member is not None else "somebody who calls"
            self._tell(f"{who}: {why}", f"no connection with {who}: {why}")
        if isinstance(why, Superseded) and not self._closing:
            self._superseded()
        if member is None:
            return
        was_open = self._forget(member.name, connection)
        if self._closing or self._proven.get(member.name):
            return
        if was_open and not isinstance(why, WireError):
            self._loop.later(0.0, lambda: self._probe(member))
        elif isinstance(why, OSError) and why.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
            self._probed(member, refused=why.errno == errno.ECONNREFUSED)

    def _forget(self, name: str, connection: Connection) -> bool:
        """Whether the connection was authenticated and in use."""
        if self._calling.get(name) is connection:
            del self._calling[name]
        proven = self._proven.get(name, [])
        was_open = connection in proven
        with suppress(ValueError):
            proven.remove(connection)
        if not proven:
            self._proven.pop(name, None)
        return was_open

    def _probed(self, member: Member, *, refused: bool) -> None:
        """The launcher's machine answers, but not the launcher; a socket that is being closed answers by a reset."""
        if member.name not in self._refused:
            return
        self._refused[member.name] += refused
        if self._refused[member.name] < REFUSALS:
            self._loop.later(PROBE_S, lambda: self._probe(member))
        else:
            del self._refused[member.name]
            self._unreachable(member.name)

    def _probe(self, member: Member) -> None:
        if member.name not in self._proven and member.name not in self._calling and not self._closing:
            self._addresses.find(member.host, partial(self._call, member))

    def _no_address(self, host: str, error: OSError) -> None:
        self._tell(
            f"address of {host}",
            f"{host} has no address here ({error.strerror}); its launcher can only call this one: "
            f"add the name to the name service or /etc/hosts, or give it as --nodes {host}=ADDRESS",
        )

    def _tell(self, key: str, text: str) -> None:
        now = time.monotonic()
        self._said = {said: at for said, at in self._said.items() if now - at < MESSAGE_INTERVAL_S}
        if key not in self._said and len(self._said) < MAX_MESSAGES:
            self._said[key] = now
            self._print_message(text)
