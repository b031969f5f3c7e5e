"""A server that takes Alertmanager's messages in place of every receiver of the shipped configuration.

Anybody may reach it. So what a client may send, how long it may take, and how many there are at once is bounded.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

MAX_BODY: Final = 1 << 20
"""Bytes of a message; Alertmanager sends about one kilobyte for each alert of a group."""
MAX_KEPT: Final = 16 << 20
"""Bytes of all messages together, which take twenty times as much once they are read; later ones are refused."""
MAX_CLIENTS: Final = 256


class _Server(ThreadingHTTPServer):
    """Alertmanager opens connections for all groups and receivers at once; a refused one may retry for a minute."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], client_s: float) -> None:
        self._places, self._client_s = threading.BoundedSemaphore(MAX_CLIENTS), client_s
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        late = threading.Timer(self._client_s, _end, (request,))
        late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client has gone, or was too slow."""


def _end(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class Message:
    """One message; ``receiver`` is webhook, slack or pagerduty, ``at`` is in monotonic seconds."""

    receiver: str
    at: float
    body: Any


class Inbox:
    """Takes what is posted to ``url``/RECEIVER within ``client_s`` seconds; port 0 is any free one.

    Raises OSError if the port is taken.
    """

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0), *, client_s: float = 10.0) -> None:
        self.messages: list[Message] = []
        self._room, self._lock = MAX_KEPT, threading.Lock()
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = self.headers.get("Content-Length", "0")
                if not re.fullmatch("[0-9]{1,9}", told) or int(told) > MAX_BODY:
                    self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                    return
                try:
                    body = json.loads(said := self.rfile.read(int(told)))
                except (ValueError, RecursionError):
                    self.send_error(HTTPStatus.BAD_REQUEST)
                    return
                if not inbox.keep(Message(self.path.strip("/").split("/")[0], time.monotonic(), body), len(said)):
                    self.send_error(HTTPStatus.INSUFFICIENT_STORAGE)
                    return
                self.send_response(HTTPStatus.OK)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = _Server(address, Handler, client_s)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="inbox", daemon=True).start()

    def keep(self, message: Message, size: int) -> bool:
        """Whether there was room for a message of ``size`` bytes."""
        with self._lock:
            if size > self._room:
                return False
            self._room -= size
            self.messages.append(message)
            return True

    def alerts(self, name: str, receiver: str = "webhook") -> list[tuple[float, Any]]:
        """Time and alert of every arrival of an alert named ``name`` at the webhook."""
        return [
            (message.at, alert)
            for message in list(self.messages)
            if message.receiver == receiver
            for alert in _alerts(message.body)
            if alert["labels"].get("alertname") == name
        ]

    def firing(self) -> list[Any]:
        """The alerts that a webhook message reported as firing, once for each message."""
        found = [alert for message in list(self.messages) for alert in _alerts(message.body)]
        return [alert for alert in found if alert.get("status") == "firing"]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _alerts(body: Any) -> list[dict[str, Any]]:
    """The alerts in a message to a webhook, whose labels are strings; what is of another form is left out."""
    listed = body.get("alerts") if isinstance(body, dict) else None
    return [alert for alert in listed if _has_labels(alert)] if isinstance(listed, list) else []


def _has_labels(alert: Any) -> bool:
    labels = alert.get("labels") if isinstance(alert, dict) else None
    return isinstance(labels, dict) and all(isinstance(value, str) for value in labels.values())
