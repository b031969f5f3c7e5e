"""The launcher's control socket: one JSON object a line each way, for its own user and root."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from opsd.launch.io.loop import Loop
from opsd.launch.io.messages import say

MAX_CONNECTIONS = 32
MAX_LINE = 64 * 1024

Request = dict[str, Any]


class ControlServer:
    """Answers requests on a Unix socket at ``path`` with what ``handle`` returns for them.

    A socket that cannot be made is reported and does not stop the run.
    """

    def __init__(self, path: Path, loop: Loop, handle: Callable[[Request], Request]) -> None:
        self._path = path
        self._loop = loop
        self._handle = handle
        self._buffers: dict[socket.socket, bytes] = {}
        self._listener: socket.socket | None = None
        try:
            self._listener = _listen(path)
        except OSError as error:
            say(f"no control socket at {path}: {error.strerror or error}")
        else:
            loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop serving and remove the socket."""
        for connection in list(self._buffers):
            self._drop(connection)
        if self._listener is not None:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if peer_uid(connection) not in (0, os.getuid()) or len(self._buffers) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._buffers[connection] = b""
        self._loop.watch(connection.fileno(), lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer = self._buffers[connection] + data
        *lines, self._buffers[connection] = buffer.split(b"\n")
        for line in lines:
            answer = self._answer(line)
            # An answer fits the socket's buffer; a client that does not read its answers loses them.
            with suppress(OSError):
                connection.send(json.dumps(answer).encode() + b"\n")
        if not data or len(self._buffers[connection]) > MAX_LINE:
            self._drop(connection)

    def _answer(self, line: bytes) -> Request:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"ok": False, "error": "the request is not JSON"}
        if not isinstance(request, dict):
            return {"ok": False, "error": "the request is not a JSON object"}
        return self._handle(request)

    def _drop(self, connection: socket.socket) -> None:
        del self._buffers[connection]
        self._loop.unwatch(connection.fileno())
        connection.close()


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid: int = struct.unpack("iII", credentials)[1]
    return uid


def _listen(path: Path) -> socket.socket:
    """A listening socket for this user only. Goes through the folder's descriptor: a socket's path has 107 bytes."""
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        listener.listen(8)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
        os.close(folder)
    return listener
