"""Asking a launcher or an agent through its control socket: one JSON object a line each way."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opsd.inodes import open_folder
from opsd.words import reason

TIMEOUT_S = 5.0
MAX_ANSWER = 65_536
LOOK_S = 10.0
"""How often who waits for an answer looks whether to go on waiting."""

_CREDENTIALS = struct.Struct("=iII")
"""``struct ucred`` of unix(7): pid, uid, gid."""


class ControlError(Exception):
    """No answer from a launcher or an agent, or one that is none; the message is one sentence."""


class GivenUpError(Exception):
    """The answer was no longer waited for; the message is why."""


def ask_launcher(control: Path, request: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Send one request to a launcher's control socket and return its answer; see ``ask``.

    Nothing is mounted over the folder of a run: a file system of its user's would have the agent wait without end.
    """
    return ask(control, request, timeout_s, "the launcher", open_parent=open_folder)


def ask(
    path: Path,
    request: Mapping[str, object],
    timeout_s: float,
    who: str,
    stop: Callable[[], str] = str,
    look_s: float = LOOK_S,
    open_parent: Callable[[Path, int], int] = os.open,
) -> dict[str, Any]:
    """Send one request to the socket at ``path`` and return the answer, which takes ``timeout_s`` at most.

    The owner of its folder has to answer. Raises ControlError, which speaks of ``who``, and GivenUpError as soon as
    ``stop``, which is asked every ``look_s``, says why; the connection is closed then.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            owner = _connect(connection, path, open_parent)
            # The kernel is asked for the peer's user after connecting, because until then the path may be exchanged for
            # a link.
            _, peer, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if peer != owner:
                raise ControlError(f"{path} is answered by another user than its folder's")
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(_read_line(connection, deadline, stop, look_s))
    except OSError as error:
        raise ControlError(f"{who} at {path} does not answer: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ControlError(f"{who} at {path} answered something else than JSON") from error
    if not isinstance(answer, dict):
        raise ControlError(f"{who} at {path} answered something else than an object")
    return answer


def _connect(connection: socket.socket, control: Path, open_parent: Callable[[Path, int], int]) -> int:
    """Connect through the folder's descriptor, for a socket's path has 107 bytes; returns the folder's owner."""
    folder = open_parent(control.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{control.name}")
        return os.fstat(folder).st_uid
    finally:
        os.close(folder)


def _read_line(connection: socket.socket, deadline: float, stop: Callable[[], str], look_s: float) -> bytes:
    """The first line. A limit for each read alone would let a launcher hold its caller by a byte now and then."""
    line = b""
    while b"\n" not in line and len(line) < MAX_ANSWER:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(min(left_s, look_s))
        try:
            part = connection.recv(MAX_ANSWER - len(line))
        except TimeoutError:
            if why := stop():
                raise GivenUpError(why) from None
            continue
        if not part:
            break
        line += part
    return line.partition(b"\n")[0]
