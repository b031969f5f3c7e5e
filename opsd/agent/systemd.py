"""The agent under systemd: sd_notify(3) and its folder in memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def notify(state: str, env: Mapping[str, str] = os.environ) -> None:
    """Send ``state`` ("READY=1", "WATCHDOG=1", "STOPPING=1"); does nothing where systemd is not listening."""
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        datagram.setblocking(False)
        datagram.sendto(state.encode(), address)


def runtime_folder(env: Mapping[str, str] = os.environ) -> Path | None:
    """The service's folder in memory (``RuntimeDirectory=``), which outlives a killed agent; None without systemd."""
    folder = env.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(folder) if folder else None
