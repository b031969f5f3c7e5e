"""One HTTP connection that never blocks: TLS handshake, one request, one answer. The protocol is h11's."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from http import HTTPStatus

import h11

from opsd import __version__

MAX_HEADER = 1 << 14
"""Limit of a request's header in bytes."""
_READ, _BLOCK = 1 << 12, 1 << 16
"""Bytes read and sent at once: h11 applies the limit to what is incomplete after each read."""

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Stage(Enum):
    """What happens next: the client sends its request, the agent works on it, the client takes the answer."""

    READING = "reading"
    WORKING = "working"
    WRITING = "writing"


class UncertifiedError(Exception):
    """A client without a certificate that is asked for, or with one that is not accepted."""


class Connection:
    """A connection of ``peer``. ``events`` are those of ``selectors`` that it waits for, 0 while the agent works.

    All of it belongs to one thread, but ``open`` may be read by any. Raises OSError where the other side has gone, one
    of ``malformed`` for what is no TLS.
    """

    try_read_again: tuple[type[OSError], ...] = (BlockingIOError,)
    try_write_again: tuple[type[OSError], ...] = (BlockingIOError,)
    want_read: tuple[type[OSError], ...] = ()
    want_write: tuple[type[OSError], ...] = ()
    malformed: tuple[type[OSError], ...] = ()
    """What a call raises that has to be made again; what TLS raises to read or write first, and for what is no TLS."""

    def __init__(self, raw: socket.socket, peer: str, now: float) -> None:
        self.peer, self.opened_at = peer, now
        self.stage, self.open = Stage.READING, True
        self.events = selectors.EVENT_READ
        raw.setblocking(False)
        self.socket = raw
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)
        self._bodiless = False
        self._out: deque[memoryview] = deque()
        self._body = b""

    def handshake(self) -> None:
        """Go on with the handshake, if there is one. Raises UncertifiedError."""

    def receive(self) -> h11.Request | None:
        """The request, once its header is complete. Raises OSError, and h11.RemoteProtocolError for what is no HTTP."""
        try:
            self.handshake()
            while data := self.socket.recv(_READ):
                self._http.receive_data(data)
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    self.stage, self.events = Stage.WORKING, 0
                    self._bodiless = event.method == b"HEAD"
                    return event
        except self.try_read_again:
            self.events = selectors.EVENT_READ
            return None
        except self.want_write:
            self.events = selectors.EVENT_WRITE
            return None
        raise ConnectionResetError("closed before its request was complete")

    def answer(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> None:
        """Queue the answer; ``send`` sends it."""
        fields = {
            "Server": f"opsd/{__version__}",
            "Date": _date(time.gmtime()),
            **headers,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
        }
        self.stage, self.events = Stage.WRITING, selectors.EVENT_WRITE
        head = self._http.send(
            h11.Response(status_code=status, headers=[*fields.items()], reason=status.phrase.encode())
        )
        self._out.append(memoryview(head or b""))
        if not self._bodiless:
            self._body = body
            self._out.append(memoryview(body))

    @property
    def unsent(self) -> bytes:
        """The body of an answer that the client has not taken all of yet, whole; else nothing."""
        return self._body if self._out else b""

    def send(self) -> bool:
        """Send what the kernel takes; whether that was all. Raises OSError."""
        try:
            while self._out:
                block = self._out[0][:_BLOCK]
                rest = self._out[0][self.socket.send(block) :] if block else block
                if rest:
                    self._out[0] = rest
                else:
                    self._out.popleft()
        except self.try_write_again:
            self.events = selectors.EVENT_WRITE
            return False
        except self.want_read:
            self.events = selectors.EVENT_READ
            return False
        return True

    def close(self) -> None:
        """Close it; what was sent still arrives."""
        self.open = False
        self._out.clear()
        self._body = b""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()


def _date(at: time.struct_time) -> str:
    """As in RFC 9110, 5.6.7. (email.utils takes half a megabyte for it.)"""
    day, month = _DAYS[at.tm_wday], _MONTHS[at.tm_mon - 1]
    return f"{day}, {at.tm_mday:02d} {month} {at.tm_year} {at.tm_hour:02d}:{at.tm_min:02d}:{at.tm_sec:02d} GMT"
