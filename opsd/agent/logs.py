"""The agent's log: fields in systemd's journal, lines of text on a terminal, JSON on any other stderr.

``journalctl -u opsd OPSD_COLLECTOR=nvml`` finds what concerns one collector, ``journalctl -u opsd -p warning`` what is
wrong. The protocol: https://systemd.io/JOURNAL_NATIVE_PROTOCOL
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, TextIO

from opsd.words import printable

_BOLD, _CYAN, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"
_HEAD = frozenset({"event", "level"})
_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m"}

SOCKET: Final = "/run/systemd/journal/socket"
MAX_NAME: Final = 64
PRIORITIES: Final = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
"""Levels as in syslog(3)."""
_PART: Final = select.PIPE_BUF
"""Bytes that can be written without waiting to what poll(2) calls writable."""

Write = Callable[[Mapping[str, object]], object]
"""Takes an event: its name in ``event``, its ``level``, and its fields."""


class Log:
    """Events with fields. (Not structlog, as it imports asyncio: a tenth of the agent's memory.)

    ``lost`` returns how many were not taken. The first one that is taken again is told that, too.
    """

    def __init__(self, write: Write, lost: Callable[[], int] = lambda: 0) -> None:
        self._take, self.lost = write, lost
        self._told = 0

    def info(self, event: str, **fields: object) -> None:
        """Something has happened."""
        self._write({**fields, "event": event, "level": "info"})

    def warning(self, event: str, **fields: object) -> None:
        """A problem that may need a person."""
        self._write({**fields, "event": event, "level": "warning"})

    def error(self, event: str, **fields: object) -> None:
        """The agent cannot do its work."""
        self._write({**fields, "event": event, "level": "error"})

    def exception(self, event: str, **fields: object) -> None:
        """As ``error``, with the traceback of the exception that is being handled."""
        self.error(event, **fields, exception=traceback.format_exc().rstrip())

    def _write(self, event: Mapping[str, object]) -> None:
        lost = self.lost()
        if lost > self._told:
            self._take({"lines": lost - self._told, "event": "lines of this log were not taken", "level": "warning"})
            if self.lost() > lost:
                return  # and neither is this one: it is counted with the next
            self._told = lost
        self._take(event)


def configure(journal: str = SOCKET) -> Log:
    """The log of this process; ``journal`` is the socket of systemd's journal."""
    sink = Sink(sys.stderr.fileno())
    if leads_to_journal(sys.stderr, os.environ):
        return Log(JournalWriter(sink, journal), lambda: sink.lost)
    form = _readable if sys.stderr.isatty() else _json
    return Log(lambda event: sink.line(form(event)), lambda: sink.lost)


def _readable(event: Mapping[str, object]) -> str:
    level = str(event["level"])
    fields = [f"{_CYAN}{name}{_PLAIN}={_shown(name, value)}" for name, value in event.items() if name not in _HEAD]
    said = f"{_COLOURS.get(level, '')}{_BOLD}{event['event']}{_PLAIN}"
    return " ".join([time.strftime("%H:%M:%S"), said, *fields])


def _shown(name: str, value: object) -> str:
    """A field on the terminal, where what users write must have no effect; only a traceback has several lines."""
    text = str(value)
    return "\n".join(map(printable, text.split("\n"))) if name == "exception" else printable(text)


def _json(event: Mapping[str, object]) -> str:
    return json.dumps({**event, "timestamp": datetime.now(UTC).isoformat()}, default=str)


class Sink:
    """A file descriptor for lines, for any thread.

    A pipe that nobody reads, a stopped terminal and a journal that hangs lose lines, which ``lost`` counts. The
    descriptor is not made non-blocking: others may share it.
    """

    def __init__(self, descriptor: int) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self._cut = False
        self._guard = threading.Lock()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def line(self, text: str) -> bool:
        """Write ``text`` as a line; False if it is lost. Lines of threads do not mix."""
        with self._guard:
            written = self._write(("\n" * self._cut + text + "\n").encode(errors="replace"))
            self._cut = self._cut and not written
            self.lost += not written
            return written

    def _write(self, data: bytes) -> bool:
        while data:
            try:
                if not any(event & select.POLLOUT for _, event in self._poll.poll(0)):
                    return False
                written = os.write(self._descriptor, data[:_PART])
            except OSError:
                return False
            self._cut, data = True, data[written:]
        return True


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
