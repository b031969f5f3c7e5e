"""Puts the output of several streams together so that their lines do not tear each other."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 1 << 20
"""A line that is longer is passed on in parts."""
_BREAK = re.compile(rb"\r?\n|\r")


@dataclass(slots=True, eq=False)
class Stream:
    """One of the streams. ``prefix`` stands before each of its lines."""

    prefix: bytes = b""
    pending: bytes = b""


class Mixer:
    """Passes on whole lines, and parts of lines once their stream is quiet.

    A carriage return ends a line as well, so that progress bars move. Streams that take turns begin new lines for it.
    """

    def __init__(self) -> None:
        self._open: Stream | None = None
        self._returned = False

    def feed(self, stream: Stream, data: bytes) -> bytes:
        """What is to be shown when ``data`` has come."""
        text = stream.pending + data
        # A carriage return at the end may be half of a line's end.
        whole = max(text.rfind(b"\n"), text.rfind(b"\r", 0, max(0, len(text) - 1))) + 1
        if len(text) - whole > LONGEST:
            whole = len(text)
        stream.pending = text[whole:]
        return self._placed(stream, text[:whole])

    def quiet(self, stream: Stream) -> bytes:
        """What is to be shown as nothing new has come for a while."""
        text, stream.pending = stream.pending, b""
        return self._placed(stream, text)

    def amid_line(self, stream: Stream) -> bool:
        """Whether a part of a long line has been passed on, which others should not interrupt."""
        return self._open is stream and not self._returned

    def _placed(self, stream: Stream, text: bytes) -> bytes:
        if not text:
            return b""
        goes_on = self.amid_line(stream)
        new_line = b"\n" if self._open not in (None, stream) else b""
        self._open, self._returned = None if text.endswith(b"\n") else stream, text.endswith(b"\r")
        return new_line + (_prefixed(text, stream.prefix, goes_on) if stream.prefix else text)


def _prefixed(text: bytes, prefix: bytes, goes_on: bool) -> bytes:
    """``text`` with ``prefix`` before each line; the first may go on with one that has it."""
    end = 2 if text.endswith(b"\r\n") else 1 if text.endswith((b"\n", b"\r")) else 0
    body = text[: len(text) - end]
    simple = b"\r" not in body
    lines = body.replace(b"\n", b"\n" + prefix) if simple else _BREAK.sub(lambda found: found[0] + prefix, body)
    return (b"" if goes_on else prefix) + lines + text[len(text) - end :]
