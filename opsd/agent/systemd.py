"""Tell systemd how the agent is doing: sd_notify(3), which is one datagram to a socket named in the environment."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


def notify(state: str, env: Mapping[str, str] = os.environ) -> None:
    """Send ``state`` ("READY=1", "WATCHDOG=1", "STOPPING=1"); does nothing where systemd is not listening."""
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        datagram.setblocking(False)
        datagram.sendto(state.encode(), address)
