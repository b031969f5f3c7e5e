"""Who is at the other end of a connection: a user of this machine, or an address of the network.

The limits of the HTTP server are per peer. Addresses of this machine are no identity, as any user may take any of them;
the kernel knows whose socket it is (sock_diag(7)).
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Final

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
