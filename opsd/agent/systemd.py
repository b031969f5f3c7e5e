"""The agent under systemd: sd_notify(3), and its log in the journal, each value in a field of its own.

``journalctl -u opsd OPSD_COLLECTOR=nvml`` finds what concerns one collector, ``journalctl -u opsd -p warning`` what is
wrong. The protocol: https://systemd.io/JOURNAL_NATIVE_PROTOCOL
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from opsd.agent.sink import Sink

SOCKET: Final = "/run/systemd/journal/socket"
MAX_NAME: Final = 64
PRIORITIES: Final = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
"""Levels as in syslog(3)."""


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


def leads_to_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is the one that systemd connected to the journal, by ``JOURNAL_STREAM`` (systemd.exec(5))."""
    try:
        info = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"


def encode(event: Mapping[str, object]) -> bytes:
    """One entry. ``event`` has ``event``, ``level`` and values, which become OPSD_NAME and stand in the message."""
    values = {name: str(value) for name, value in event.items() if name not in ("event", "level")}
    said = " ".join([str(event.get("event", "")), *(f"{name}={value}" for name, value in values.items() if value)])
    fields = {
        "MESSAGE": said,
        "PRIORITY": str(PRIORITIES.get(str(event.get("level")), PRIORITIES["info"])),
        "SYSLOG_IDENTIFIER": "opsd",
        **{"OPSD_" + re.sub("[^A-Z0-9_]", "_", name.upper()): value for name, value in values.items()},
    }
    return b"".join(_field(name[:MAX_NAME], value.encode("utf-8", "replace")) for name, value in fields.items())


def _field(name: str, value: bytes) -> bytes:
    """With its length in front of it, because it may hold line ends."""
    return name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"


class JournalWriter:
    """Records that the journal does not accept at once go to ``stderr`` as JSON, which also leads to it."""

    def __init__(self, stderr: Sink, path: str = SOCKET) -> None:
        self._stderr, self._path = stderr, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def __call__(self, event: Mapping[str, object]) -> None:
        """Write one entry."""
        try:
            self._socket.sendto(encode(event), self._path)
        except OSError:
            self._stderr.line(json.dumps(event, default=str))
