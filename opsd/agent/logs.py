"""The agent's log: fields in systemd's journal, lines of text on a terminal, JSON on any other stderr."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from opsd.agent.sink import Sink
from opsd.agent.systemd import SOCKET, JournalWriter, leads_to_journal
from opsd.words import printable

_BOLD, _CYAN, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"
_HEAD = frozenset({"event", "level"})
_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m"}

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
