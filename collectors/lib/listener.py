"""Whose process is at the other end of a connection within this node: the kernel knows the owner of every socket.

Any user may listen on a free port of localhost. A listener is trusted by its owner, never by its port. The
kernel is asked about one socket by its addresses (sock_diag(7), inet_diag_req_v2), which takes microseconds on a node
with many connections, where /proc/net/tcp takes milliseconds.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
import struct
import time
from collections.abc import Iterable
from typing import Final

_REQUEST: Final = struct.Struct("=IHHII BBBBI 2s2s16s16sIII")
_ANSWER: Final = struct.Struct("=IHHII BBBB 2s2s16s16sIII IIIII")
_SOCK_DIAG_BY_FAMILY: Final = 20
_ALL_STATES: Final = 0xFFFF_FFFF
_NO_COOKIE: Final = 0xFFFF_FFFF
_LISTEN: Final = 10
_TIMEOUT_S: Final = 0.5
ACCEPT_LOOKS_S: Final = 0.001


class UntrustedError(Exception):
    """The listener belongs to an untrusted or unknown user; the message says so."""


def trusted_uids(users: Iterable[str]) -> frozenset[int]:
    """Root, the user of this process, and ``users`` by name or number; names that this node does not know are none."""
    uids = {0, os.geteuid()}
    for user in users:
        try:
            uids.add(int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid)
        except KeyError:
            continue
    return frozenset(uids)


def peer_uid(connection: socket.socket) -> int | None:
    """The owner of the other end of a connected TCP ``connection`` on this node; None until a process has accepted it.

    Raises OSError if the kernel has no such socket or cannot be asked.
    """
    state, uid, inode = _ask(connection.family, connection.getpeername(), connection.getsockname())
    # The queue of a listener has sockets without an owner, for which older kernels say root.
    return uid if inode and state != _LISTEN else None


def listener_uid(connection: socket.socket) -> int | None:
    """The owner of what listens where ``connection`` goes to; None if nothing does any more. Raises OSError."""
    try:
        state, uid, _ = _ask(connection.family, connection.getpeername(), ("", 0))
    except FileNotFoundError:
        return None
    return uid if state == _LISTEN else None


def connect(host: str, port: int, uids: frozenset[int], timeout_s: float) -> socket.socket:
    """A connection to what listens at ``port`` of ``host``, a name or address of this node, and belongs to ``uids``.

    A name may stand for several addresses: the first believed one is taken. Raises ConnectionRefusedError if nothing
    listens, UntrustedError if nobody who does is believed, OSError if a believed one does not answer in ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    problem: Exception = ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(deadline - time.monotonic(), ACCEPT_LOOKS_S))
            connection.connect(address)
            check_owner(connection, uids, deadline)
        except (OSError, UntrustedError) as error:
            connection.close()
            if not isinstance(error, ConnectionRefusedError):
                problem = error
            continue
        return connection
    raise problem


def check_owner(connection: socket.socket, uids: frozenset[int], deadline: float) -> None:
    """Return once a process of ``uids`` has accepted ``connection``; nothing should be sent before.

    ``deadline`` is in monotonic seconds. Raises UntrustedError, and TimeoutError if nobody accepts.
    """
    try:
        _check(connection, listener_uid(connection), uids)
        while (uid := peer_uid(connection)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "nobody accepts the connection")
            time.sleep(ACCEPT_LOOKS_S)
    except TimeoutError:
        raise
    except OSError as error:
        raise UntrustedError(f"the kernel does not tell whose {_name(connection)} is: {error.strerror}") from error
    _check(connection, uid, uids)


def _check(connection: socket.socket, uid: int | None, uids: frozenset[int]) -> None:
    if uid is not None and uid not in uids:
        raise UntrustedError(f"what listens at {_name(connection)} belongs to user {uid}, who is not believed")


def _name(connection: socket.socket) -> str:
    host, port = connection.getpeername()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ask(family: int, local: tuple[str, int], remote: tuple[str, int]) -> tuple[int, int, int]:
    """State, uid and inode of the socket at ``local`` that is connected to ``remote``, or that listens at ``local``."""
    request = _REQUEST.pack(
        _REQUEST.size, _SOCK_DIAG_BY_FAMILY, 1, 0, 0,
        family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES,
        local[1].to_bytes(2, "big"), remote[1].to_bytes(2, "big"),
        _packed(family, local[0]), _packed(family, remote[0]),
        0, _NO_COOKIE, _NO_COOKIE,
    )  # fmt: skip
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as kernel:  # NETLINK_SOCK_DIAG
        kernel.settimeout(_TIMEOUT_S)
        kernel.connect((0, 0))
        kernel.send(request)
        answer = kernel.recv(4096)
    _, what, *_ = struct.unpack_from("=IHHII", answer)
    if what != _SOCK_DIAG_BY_FAMILY or len(answer) < _ANSWER.size:
        code = -struct.unpack_from("=i", answer, 16)[0] if len(answer) >= 20 else errno.EPROTO
        raise OSError(code, os.strerror(code))
    fields = _ANSWER.unpack_from(answer)
    return fields[6], fields[-2], fields[-1]


def _packed(family: int, host: str) -> bytes:
    address = socket.inet_pton(family, host.partition("%")[0]) if host else b""
    return address.ljust(16, b"\0")
