"""The agent's log: fields in systemd's journal, lines of text on a terminal, JSON on any other stderr."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

from opsd.agent.systemd import SOCKET, JournalWriter, leads_to_journal

_BOLD, _CYAN, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"
_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m"}

Write = Callable[[Mapping[str, object]], None]
"""Takes an event: its name in ``event``, its ``level``, and its fields."""


class Log:
    """Events with fields. (Not structlog, as it imports asyncio: a tenth of the agent's memory.)"""

    def __init__(self, write: Write) -> None:
        self._write = write

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


def configure(journal: str = SOCKET) -> Log:
    """The log of this process; ``journal`` is the socket of systemd's journal."""
    if leads_to_journal(sys.stderr, os.environ):
        return Log(JournalWriter(journal))
    return Log(_show if sys.stderr.isatty() else _tell)


def _show(event: Mapping[str, object]) -> None:
    level = str(event["level"])
    fields = [f"{_CYAN}{name}{_PLAIN}={value}" for name, value in event.items() if name not in ("event", "level")]
    said = f"{_COLOURS.get(level, '')}{_BOLD}{event['event']}{_PLAIN}"
    _line(" ".join([time.strftime("%H:%M:%S"), said, *fields]))


def _tell(event: Mapping[str, object]) -> None:
    _line(json.dumps({**event, "timestamp": datetime.now(UTC).isoformat()}, default=str))


def _line(text: str) -> None:
    """Write a line in one call, so that lines of threads do not mix. A closed log is ignored."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
