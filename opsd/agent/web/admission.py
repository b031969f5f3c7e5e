"""Whom the agent's HTTP server answers: by name, and by what a peer has taken of connections, time and room.

A peer is a user of this machine, or an address of the network. Addresses of this machine are no identity, as any user
may take any of them; the kernel knows whose socket it is (sock_diag(7)).
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from opsd.agent.web.connection import Connection, Stage

CONNECTIONS: Final = 200, 100.0
"""How many connections a peer may make at once, and then in a second."""
ANSWERS: Final = 2.0, 0.1
"""Seconds of processor time for the answers to a peer that are made for it alone: at once, and in each second."""


class Budget:
    """The budget of each peer: ``burst`` at once, then ``rate`` in a second. Any thread may ask.

    It is spent in attempts, or in seconds of processor time. A peer in debt waits until the debt is paid. ``MAX_PEERS``
    are remembered.
    """

    MAX_PEERS: Final = 1024

    def __init__(self, burst: float, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ahead_s, self._rate, self._clock = burst / rate, rate, clock
        self._paid_at: dict[str, float] = {}
        self._guard = threading.Lock()

    def affords(self, peer: str, cost: float = 0.0) -> bool:
        """Whether ``peer`` has anything left, or ``cost``."""
        with self._guard:
            now = self._clock()
            return max(self._paid_at.get(peer, 0.0), now) + cost / self._rate <= now + self._ahead_s

    def charge(self, peer: str, cost: float) -> None:
        """Take off what something for ``peer`` has cost."""
        with self._guard:
            self._paid_at[peer] = max(self._paid_at.pop(peer, 0.0), self._clock()) + cost / self._rate
            if len(self._paid_at) > self.MAX_PEERS:
                del self._paid_at[next(iter(self._paid_at))]

    def allow(self, peer: str) -> bool:
        """Count an attempt of ``peer``; whether it may be made. For one thread."""
        allowed = self.affords(peer, 1.0)
        self.charge(peer, float(allowed))
        return allowed


class Budgets:
    """Those of all peers. Root and this user, or whoever is ``unlimited``, may connect and ask as they like."""

    def __init__(
        self,
        *,
        unlimited: Collection[str] | None = None,
        connections: Budget | None = None,
        answers: Budget | None = None,
    ) -> None:
        self._unlimited = {f"uid {uid}" for uid in (0, os.geteuid())} if unlimited is None else unlimited
        self._connections = connections or Budget(*CONNECTIONS)
        self._answers = answers or Budget(*ANSWERS)

    def may_connect(self, peer: str) -> bool:
        """Count a connection of ``peer``; whether it is served. For one thread."""
        return peer in self._unlimited or self._connections.allow(peer)

    def may_ask(self, peer: str) -> bool:
        """Whether ``peer`` may have an answer that costs something."""
        return peer in self._unlimited or self._answers.affords(peer)

    def charge(self, peer: str, used_s: float) -> None:
        """Take off what it has cost."""
        self._answers.charge(peer, used_s)


class Hosts:
    """Names that are answered: addresses, localhost, and ``names``. Case does not matter. Thread-safe.

    A page of another site may point its own name at this node's address (DNS rebinding), to read the agent through a
    visitor's browser; the browser then sends that name as ``Host``. Over TLS the certificate decides instead.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset({"localhost", *(_plain_name(name) for name in names)})

    def admit(self, host: str) -> bool:
        """Whether a request with this ``Host`` is answered; without one it comes from no browser."""
        name = _plain_name(host)
        return not host.strip() or name in self._names or _is_address(name)

    def add(self, name: str) -> None:
        """Answer to this name as well."""
        self._names |= {_plain_name(name)}


def own_hosts(node: str, names: Iterable[str]) -> Hosts:
    """The names of this machine, of ``node``, and ``names``. The name in DNS is added once it is known."""
    own = os.uname().nodename
    hosts = Hosts((node, own, own.partition(".")[0], *names))

    def ask() -> None:
        with suppress(OSError, UnicodeError):
            for *_, name, _address in socket.getaddrinfo(own, None, flags=socket.AI_CANONNAME):
                hosts.add(name)

    threading.Thread(target=ask, name="own-names", daemon=True).start()
    return hosts


def _plain_name(host: str) -> str:
    """``host`` in lower case, without its port and the dot of a fully qualified name."""
    name, colon, port = host.strip().lower().rpartition(":")
    if not colon or not ((port.isascii() and port.isdigit()) or not port) or (":" in name and not name.endswith("]")):
        name = host.strip().lower()
    return name.removeprefix("[").removesuffix("]").removesuffix(".")


def _is_address(name: str) -> bool:
    for family, address in ((socket.AF_INET, name), (socket.AF_INET6, name.partition("%")[0])):
        with suppress(OSError, ValueError):
            socket.inet_pton(family, address)
            return True
    return False


def oldest(connections: Iterable[Connection]) -> Connection:
    """The one to close first: a client that is there for an answer sends its request at once."""
    return min(connections, key=lambda c: (c.stage is not Stage.READING, c.opened_at))


def too_much(connections: Iterable[Connection], body: bytes, limit: int) -> Sequence[Connection]:
    """Those to close so that ``body`` and what is unsent are ``limit`` bytes at most, of the peers that left most.

    An answer that several wait for is there once.
    """
    writing = [c for c in connections if c.stage is Stage.WRITING]
    closed: list[Connection] = []
    while writing and _size([body, *(c.unsent for c in writing)]) > limit:
        peers = {c.peer for c in writing}
        most = max(peers, key=lambda peer: _size(c.unsent for c in writing if c.peer == peer))
        late = oldest(c for c in writing if c.peer == most)
        writing.remove(late)
        closed.append(late)
    return closed


def _size(bodies: Iterable[bytes]) -> int:
    """Bytes of ``bodies``, the same one counted once."""
    return sum({id(body): len(body) for body in bodies}.values())


_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_HEADER = struct.Struct("=IHHII")
"""``struct nlmsghdr``: length, type, flags, sequence, port."""
_REQUEST = struct.Struct("=BBBxI")
"""Begin of ``struct inet_diag_req_v2``: family, protocol, extensions, states."""
_OWNER = struct.Struct("=II")
"""uid and inode in ``struct inet_diag_msg``, at ``_OWNER_AT`` of the whole answer."""
_OWNER_AT: Final = 16 + 4 + 48 + 12
_ANY: Final = 0xFFFFFFFF
TIMEOUT_S: Final = 0.2

Address = tuple[Any, ...]
"""Host and port as the socket module has them."""


def peer_of(connection: socket.socket) -> str:
    """A user of this machine as "uid 1000", else the IPv4 address or the /64 of the IPv6 address.

    It is "this machine" where the kernel does not say whose socket it is, for instance because it is closed already.
    Raises OSError.
    """
    theirs, own = connection.getpeername(), connection.getsockname()
    host = _plain(theirs[0])
    if host == _plain(own[0]) or host.startswith("127."):
        uid = owner_of(connection.family, theirs, own)
        return "this machine" if uid is None else f"uid {uid}"
    if ":" not in host:
        return host
    network = socket.inet_pton(socket.AF_INET6, host)[:8] + bytes(8)
    return f"{socket.inet_ntop(socket.AF_INET6, network)}/64"


def owner_of(family: int, local: Address, remote: Address) -> int | None:
    """The uid of the TCP socket of this machine that is connected from ``local`` to ``remote``; None if not known."""
    ends = b"".join(socket.inet_pton(family, end[0].partition("%")[0]).ljust(16, b"\0") for end in (local, remote))
    asked = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ANY) + struct.pack(">HH", local[1], remote[1]) + ends
    asked += struct.pack("=III", 0, _ANY, _ANY)  # any interface, any cookie
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(TIMEOUT_S)
            kernel.send(_HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + asked)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if len(answer) < _OWNER_AT + _OWNER.size or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    uid, inode = _OWNER.unpack_from(answer, _OWNER_AT)
    return uid if inode else None  # a socket that its process has closed belongs to nobody and says uid 0


def _plain(host: str) -> str:
    """Without the zone of a link-local address, and an IPv4 address as such."""
    return host.partition("%")[0].removeprefix("::ffff:")
