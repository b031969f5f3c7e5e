"""The control socket of a launcher or an agent: one JSON object a line each way, for its own user and root."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import print_message
from opsd.rundir import unmapped_uid

MAX_CONNECTIONS = 32
MAX_LINE = 64 * 1024
PAUSE_S = 0.2
"""How long no connection is accepted after the process has run out of descriptors."""

Request = dict[str, Any]


class _Client:
    """One connection: an incomplete line, and lines that wait for their answer."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self.partial = bytearray()
        self.lines: deque[bytes] = deque()
        self.watched = False


class ControlServer:
    """Answers requests on a Unix socket at ``path`` with the result of ``handle``.

    Each turn of the loop answers one request per client. A client that does not read its answers is dropped, and so is
    the oldest one if there are too many. A socket that cannot be created is reported to ``say`` and stops nothing.
    """

    def __init__(
        self,
        path: Path,
        loop: Loop,
        handle: Callable[[Request], Request],
        say: Callable[[str], None] = print_message,
    ) -> None:
        self._path = path
        self._loop = loop
        self._handle = handle
        self._clients: list[_Client] = []
        self._listener: socket.socket | None = None
        # In a user namespace the machine's root has no id. The socket's mode keeps all other users out.
        self._peers = {0, os.getuid(), unmapped_uid()}
        try:
            self._listener = _listen(path)
        except OSError as error:
            say(f"no control socket at {path}: {error.strerror or error}")
        else:
            self._admit()

    def close(self) -> None:
        """Stop serving and remove the socket."""
        for client in list(self._clients):
            self._drop(client)
        if self._listener is not None:
            if self._admitting:
                self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    def _admit(self) -> None:
        if self._listener is not None:
            self._loop.watch(self._listener.fileno(), self._accept)
            self._admitting = True

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Without a descriptor left, a waiting client would wake the loop continuously.
            self._loop.unwatch(self._listener.fileno())
            self._admitting = False
            self._loop.later(PAUSE_S, self._admit)
            return
        if peer_uid(connection) not in self._peers:
            connection.close()
            return
        if len(self._clients) >= MAX_CONNECTIONS:
            self._drop(self._clients[0])
        connection.setblocking(False)
        client = _Client(connection)
        self._clients.append(client)
        self._watch(client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.socket.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        *lines, rest = data.split(b"\n")
        if lines:
            client.lines.append(bytes(client.partial) + lines[0])
            client.lines.extend(lines[1:])
            client.partial.clear()
        client.partial += rest
        if len(client.partial) > MAX_LINE:
            self._drop(client)
        elif client.lines:
            # Nothing more is read before these have their answers.
            self._unwatch(client)
            self._answer_next(client)

    def _answer_next(self, client: _Client) -> None:
        if client not in self._clients:
            return
        answer = json.dumps(self._answer(client.lines.popleft())).encode() + b"\n"
        try:
            whole = client.socket.send(answer) == len(answer)
        except OSError:
            whole = False
        if not whole:
            self._drop(client)
        elif client.lines:
            self._loop.later(0.0, lambda: self._answer_next(client))
        else:
            self._watch(client)

    def _answer(self, line: bytes) -> Request:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"ok": False, "error": "the request is not JSON"}
        if not isinstance(request, dict):
            return {"ok": False, "error": "the request is not a JSON object"}
        return self._handle(request)

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        self._unwatch(client)
        client.socket.close()

    def _watch(self, client: _Client) -> None:
        self._loop.watch(client.socket.fileno(), lambda: self._read(client))
        client.watched = True

    def _unwatch(self, client: _Client) -> None:
        if client.watched:
            self._loop.unwatch(client.socket.fileno())
            client.watched = False


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid: int = struct.unpack("iII", credentials)[1]
    return uid


def _listen(path: Path) -> socket.socket:
    """A listening socket for this user only. Bound through the folder's descriptor: socket paths have a short limit."""
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        listener.listen(4 * MAX_CONNECTIONS)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
        os.close(folder)
    return listener
