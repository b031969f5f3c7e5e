"""One HTTP connection that never blocks: TLS handshake, one request, one answer. The protocol is h11's."""

from __future__ import annotations

import selectors
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from email.utils import formatdate
from enum import Enum
from http import HTTPStatus

import h11

from opsd import __version__

MAX_HEADER = 1 << 14
"""Limit of a request's header in bytes."""
_READ, _BLOCK = 1 << 12, 1 << 16
"""Bytes read and sent at once: h11 applies the limit to what is incomplete after each read."""


class Stage(Enum):
    """What happens next: the client sends its request, the agent works on it, the client takes the answer."""

    READING = "reading"
    WORKING = "working"
    WRITING = "writing"


class Connection:
    """A connection of ``peer``. ``events`` are those of ``selectors`` that it waits for, 0 while the agent works.

    All of it belongs to one thread, but ``open`` may be read by any. Raises OSError where the other side has gone.
    """

    def __init__(self, raw: socket.socket, peer: str, context: ssl.SSLContext | None, now: float) -> None:
        self.peer, self.opened_at = peer, now
        self.stage, self.open = Stage.READING, True
        self.events = selectors.EVENT_READ
        raw.setblocking(False)
        self.socket = raw
        if context is not None:
            self.socket = context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)
        self._bodiless = False
        self._out: deque[memoryview] = deque()

    def receive(self) -> h11.Request | None:
        """The request, once its header is complete. Raises OSError, and h11.RemoteProtocolError for what is no HTTP."""
        try:
            if isinstance(self.socket, ssl.SSLSocket):
                self.socket.do_handshake()
            while data := self.socket.recv(_READ):
                self._http.receive_data(data)
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    self.stage, self.events = Stage.WORKING, 0
                    self._bodiless = event.method == b"HEAD"
                    return event
        except (BlockingIOError, ssl.SSLWantReadError):
            self.events = selectors.EVENT_READ
            return None
        except ssl.SSLWantWriteError:
            self.events = selectors.EVENT_WRITE
            return None
        raise ConnectionResetError("closed before its request was complete")

    def answer(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> None:
        """Queue the answer; ``send`` sends it."""
        fields = {
            "Server": f"opsd/{__version__}",
            "Date": formatdate(usegmt=True),
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
            self._out.append(memoryview(body))

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
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.events = selectors.EVENT_WRITE
            return False
        except ssl.SSLWantReadError:
            self.events = selectors.EVENT_READ
            return False
        return True

    def close(self) -> None:
        """Close it; what was sent still arrives."""
        self.open = False
        self._out.clear()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()
