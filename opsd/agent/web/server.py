"""The agent's HTTP server: GET and HEAD only, loopback by default.

Each request has a thread from a small pool, and a few seconds in total. A client that does not read, or writes a byte a
minute, is disconnected and cannot block the agent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from opsd import __version__
from opsd.agent.logs import Log
from opsd.agent.web.access import WebConfig
from opsd.agent.web.app import App, Request, problem

MAX_CONNECTIONS = 64
CONNECTION_S = 5.0
"""A connection is closed after this many seconds in any case."""
POLL_S = 0.2
"""Interval of checks of connections, and the longest time to stop, in seconds."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = f"opsd/{__version__}"
    sys_version = ""
    timeout = CONNECTION_S
    wbufsize = 1 << 16

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if not self.server.web.admits(self.headers.get("Authorization", "")):
            status, body, headers = problem(HTTPStatus.UNAUTHORIZED, "this agent asks for a user and a password")
            self._send(status, body, {**headers, "WWW-Authenticate": 'Basic realm="opsd", charset="UTF-8"'}, with_body)
            return
        try:
            request = self._request()
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST, "not an address that can be understood")
            return
        try:
            status, body, headers = self.server.app(request)
        except Exception:
            self.server.log.exception("request failed", path=request.path)
            status, body, headers = problem(HTTPStatus.INTERNAL_SERVER_ERROR, "a bug in opsd; the agent's log has more")
        self._send(status, body, headers, with_body)

    def _send(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _request(self) -> Request:
        """The parsed request. Raises ValueError for an invalid address, or one with too many parameters."""
        url = urlsplit(self.path)
        return Request(
            url.path,
            parse_qs(url.query, max_num_fields=20),
            self.headers.get("Accept", ""),
            self.headers.get("Accept-Encoding", ""),
        )

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: there is a scrape every second."""


class Server(ThreadingHTTPServer):
    """Listens on ``listen`` ("127.0.0.1:9477", "[::1]:9477") at once, and answers from ``start`` to ``close``.

    ``web`` has certificate and passwords; without it every client is answered, unencrypted.

    Raises OSError if the address cannot be listened on.
    """

    block_on_close = False
    request_queue_size = 64

    app: App

    def __init__(self, listen: str, log: Log, web: WebConfig | None = None) -> None:
        self.log = log
        self.web = web or WebConfig()
        self._open: dict[socket.socket, float] = {}
        self._guard = threading.Lock()
        self._threads_kept = ThreadPoolExecutor(MAX_CONNECTIONS, "http")
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, int(port)), _Handler)

    def start(self, app: App) -> None:
        """Answer requests with ``app``, including those that are already waiting."""
        self.app = app
        threading.Thread(target=self.serve_forever, args=(POLL_S,), name="http", daemon=True).start()

    @property
    def address(self) -> str:
        """Host and port in use, for instance after listening on port 0."""
        host = f"[{self.server_name}]" if self.address_family == socket.AF_INET6 else self.server_name
        return f"{host}:{self.server_port}"

    def close(self) -> None:
        """Stop serving and close all connections."""
        self.shutdown()
        self._cut_off(opened_before=time.monotonic())
        self.server_close()
        self._threads_kept.shutdown(wait=False)

    def server_bind(self) -> None:
        """Bind without http.server's look-up of the host name, which a dead name server would delay."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; the thread that answers it does the TLS handshake."""
        connection, address = super().get_request()
        if self.web.context is not None:
            connection = self.web.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def verify_request(self, request: Any, _client_address: Any) -> bool:
        """Refuse a connection while all threads are in use."""
        with self._guard:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[request] = time.monotonic()
            return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of the pool: starting fifty threads at once would take as long as fifty answers."""
        self._threads_kept.submit(self.process_request_thread, request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close and remove a connection."""
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Every ``POLL_S``: close connections that are over their time limit."""
        self._cut_off(opened_before=time.monotonic() - CONNECTION_S)

    def _cut_off(self, *, opened_before: float) -> None:
        with self._guard:
            for connection in [c for c, since in self._open.items() if since < opened_before]:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnected, or was disconnected, is no error."""
