"""Connections to the other launchers, made when there is something to say and kept."""

from __future__ import annotations

import errno
import socket
import time
from collections import deque
from collections.abc import Callable

from opsd.launch.io.connection import Connection, Identity
from opsd.launch.io.loop import Loop
from opsd.launch.io.member import Member, Message
from opsd.launch.io.wire import WireError, encode

PROBE_S = 0.15
REFUSALS = 2
"""A launcher whose connection broke is called again at once and after ``PROBE_S``; refused both times, it is gone."""
SAY_AGAIN_S = 60.0
MAX_SAID = 32
"""Different sentences within ``SAY_AGAIN_S``."""
MAX_STRANGERS = 1024
"""Connections on which the other side has not proven itself."""
BACKLOG = 4096
PAUSE_S = 1.0
FAREWELL_S = 0.3


class Transport:
    """Sends messages to launchers by name. What cannot be delivered soon is dropped; who must know asks again."""

    def __init__(
        self,
        own: Identity,
        loop: Loop,
        *,
        received: Callable[[Member, Message], None],
        unreachable: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._own = own
        self._loop = loop
        self._received = received
        self._unreachable = unreachable
        self._say = say
        self._said: dict[str, float] = {}
        self._listener: socket.socket | None = None
        self._open: dict[str, Connection] = {}
        self._calling: dict[str, Connection] = {}
        self._strangers: set[Connection] = set()
        self._refused: dict[str, int] = {}
        self._closing = self._paused = False
        self._encoded: deque[tuple[Message, bytes]] = deque(maxlen=4)

    def listen(self) -> None:
        """Raises OSError if the address or port cannot be had."""
        member = self._own.member
        family = socket.AF_INET6 if ":" in member.address else socket.AF_INET
        self._listener = socket.create_server((member.address, member.port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._loop.watch(self._listener.fileno(), self._accept)

    def send(self, member: Member, message: Message) -> None:
        """Send, calling the other launcher if there is no connection to it."""
        connection = self._open.get(member.name) or self._calling.get(member.name)
        if connection is None and not self._closing:
            connection = self._call(member)
        if connection is not None:
            connection.send(self._payload(message))

    def _payload(self, message: Message) -> bytes:
        """What is sent to many is encoded once: messages are not changed after they were sent."""
        for known, payload in self._encoded:
            if known is message:
                return payload
        payload = encode(message)
        self._encoded.append((message, payload))
        return payload

    def close(self) -> None:
        """Send what is waiting, for a moment, and end all connections."""
        self._closing = True
        if self._listener is not None:
            if not self._paused:
                self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in [*self._open.values(), *self._calling.values(), *self._strangers]:
            connection.drain(FAREWELL_S)
            connection.close()

    def _call(self, member: Member) -> Connection | None:
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in member.address else socket.AF_INET)
        except OSError as error:
            self._tell("sockets", f"no connection to {member.name}: {error.strerror}")
            return None
        connection = self._calling[member.name] = Connection(
            sock, self._loop, self._own, expected=member,
            opened=self._opened, received=self._received, closed=self._closed,
        )  # fmt: skip
        return connection

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._tell("sockets", f"no connections of other launchers: {error.strerror}; raise `ulimit -n`")
                self._pause_listening(self._listener)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            sock.close()
            return
        self._strangers.add(
            Connection(
                sock, self._loop, self._own, expected=None,
                opened=self._opened, received=self._received, closed=self._closed,
            )
        )  # fmt: skip

    def _pause_listening(self, listener: socket.socket) -> None:
        """Leave those who call waiting for a while; they would wake the loop again and again."""

        def go_on() -> None:
            if self._listener is listener:
                self._loop.watch(listener.fileno(), self._accept)
            self._paused = False

        self._paused = True
        self._loop.unwatch(listener.fileno())
        self._loop.later(PAUSE_S, go_on)

    def _opened(self, connection: Connection) -> None:
        assert connection.peer is not None
        name = connection.peer.name
        self._strangers.discard(connection)
        if self._calling.get(name) is connection:
            del self._calling[name]
        self._open[name] = connection
        self._refused[name] = 0

    def _closed(self, connection: Connection, why: Exception | None) -> None:
        self._strangers.discard(connection)
        member = connection.peer or connection.expected
        if isinstance(why, WireError):
            who = f"the launcher at {member.address} ({member.name})" if member is not None else "somebody who calls"
            self._tell(f"{who}: {why}", f"no connection with {who}: {why}")
        if member is None:
            return
        was_open = self._open.get(member.name) is connection
        if was_open:
            del self._open[member.name]
        if self._calling.get(member.name) is connection:
            del self._calling[member.name]
        if self._closing:
            return
        if was_open and not isinstance(why, WireError):
            self._loop.later(0.0, lambda: self._probe(member))
        elif isinstance(why, OSError) and why.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
            self._probed(member, refused=why.errno == errno.ECONNREFUSED)

    def _probed(self, member: Member, *, refused: bool) -> None:
        """Somebody answers for a launcher, but not itself; a socket that is just being closed answers by a reset."""
        if member.name not in self._refused:
            return
        self._refused[member.name] += refused
        if self._refused[member.name] < REFUSALS:
            self._loop.later(PROBE_S, lambda: self._probe(member))
        else:
            del self._refused[member.name]
            self._unreachable(member.name)

    def _probe(self, member: Member) -> None:
        if member.name not in self._open and member.name not in self._calling and not self._closing:
            self._call(member)

    def _tell(self, key: str, text: str) -> None:
        now = time.monotonic()
        self._said = {said: at for said, at in self._said.items() if now - at < SAY_AGAIN_S}
        if key not in self._said and len(self._said) < MAX_SAID:
            self._said[key] = now
            self._say(text)
