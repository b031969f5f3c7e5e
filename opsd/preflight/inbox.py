"""A server that takes Alertmanager's messages in place of every receiver of the shipped configuration."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    """Alertmanager opens connections for all groups and receivers at once; a refused one may retry for a minute."""

    daemon_threads = True
    request_queue_size = 1024


@dataclass(frozen=True, slots=True)
class Message:
    """One message; ``receiver`` is webhook, slack or pagerduty, ``at`` is in monotonic seconds."""

    receiver: str
    at: float
    body: Any


class Inbox:
    """Takes what is posted to ``url``/RECEIVER; port 0 is any free one. Raises OSError if the port is taken."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.messages: list[Message] = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", "0"))
                body = json.loads(self.rfile.read(length) or b"null")
                inbox.messages.append(Message(self.path.strip("/").split("/")[0], time.monotonic(), body))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = _Server(address, Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="inbox", daemon=True).start()

    def alerts(self, name: str, receiver: str = "webhook") -> list[tuple[float, Any]]:
        """Time and alert of every arrival of an alert named ``name`` at the webhook."""
        return [
            (message.at, alert)
            for message in list(self.messages)
            if message.receiver == receiver and isinstance(message.body, dict)
            for alert in message.body.get("alerts", ())
            if alert["labels"]["alertname"] == name
        ]

    def firing(self) -> list[Any]:
        """The alerts that a webhook message reported as firing, once for each message."""
        bodies = [message.body for message in list(self.messages) if isinstance(message.body, dict)]
        return [alert for body in bodies for alert in body.get("alerts", ()) if alert["status"] == "firing"]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
