"""The agent's HTTP server: metrics, health and incidents; GET and HEAD only, read only, loopback by default.

========================= ==========================================================================
``/``                     this node for people; ``?refresh=5`` loads it again every 5 s
``/job/ID``               one job, or one run by its name: this node, and what the job's other nodes say
``/runbooks/NAME``        the page of a runbook or an alert; ``/runbooks/`` lists them
``/metrics``              every series, Prometheus text or OpenMetrics
``/healthz``              200 while the loop ticks, 503 otherwise
``/readyz``               200 once the first collection is done and while the loop ticks
``/api/v1/status``        collectors, GPUs, ranks, runs, journal
``/api/v1/ranks``         what the rank pages say, recent steps included; ``?job=4242``
``/api/v1/jobs/ID``       what this node knows of a job, in brief
``/api/v1/incidents``     ``?state=open&state=current&limit=50``, newest first; ``?symptoms=1``: symptoms whole
``/api/v1/incidents/ID``  one incident, its symptoms, and past ones like it
``/api/v1/statistics``    how incidents went, by kind
========================= ==========================================================================

A request has a thread to itself, of which there are few, and a few seconds to be read and answered: a scraper that
never reads, or writes a byte a minute, is cut off and cannot hold the agent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from opsd import __version__
from opsd.agent import api
from opsd.agent.exposition import Exposition
from opsd.agent.job_nodes import JobNodes
from opsd.agent.ledgers import Ledgers
from opsd.agent.logs import Log
from opsd.agent.loop import Snapshot
from opsd.agent.page import REFRESH_S, node_page
from opsd.agent.page_cache import PageCache
from opsd.agent.page_history import History
from opsd.agent.page_html import HEADERS
from opsd.agent.page_job import job_page, node_of_job
from opsd.agent.page_runbooks import runbook_list, runbook_page
from opsd.agent.web_config import WebConfig

MAX_CONNECTIONS = 64
CONNECTION_S = 5.0
"""A connection is closed after this many seconds, whatever it is doing."""
POLL_S = 0.2
"""How often connections are looked at, and how long stopping takes at most."""
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
JSON = "application/json; charset=utf-8"

Answer = tuple[HTTPStatus, bytes, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """What of a request matters here. ``query`` has every value of every parameter."""

    path: str
    query: Mapping[str, list[str]]
    accept: str = ""
    accept_encoding: str = ""


class App:
    """Answers requests from the newest snapshot. ``stale_s``: a loop that has not ticked for longer is not healthy."""

    def __init__(
        self,
        latest: Callable[[], Snapshot],
        facts: Mapping[str, Any],
        *,
        stale_s: float,
        history: History | None = None,
        ledgers: Ledgers | None = None,
        job_nodes: JobNodes | None = None,
    ) -> None:
        self._latest = latest
        self._facts = facts
        self._history = history or History()
        self._ledgers = ledgers or Ledgers()
        self._job_nodes = job_nodes
        self._pages = PageCache()
        self._stale_s = stale_s
        self._exposition = Exposition(lambda: latest().samples)
        self._routes: Mapping[str, Callable[[Request], Answer]] = {
            "/": self._index,
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/api/v1/status": self._status,
            "/api/v1/ranks": self._ranks,
            "/api/v1/incidents": self._incidents,
            "/api/v1/statistics": lambda _request: _json(api.incident_statistics(self._latest())),
        }

    def __call__(self, request: Request) -> Answer:
        """The answer to one request; safe to be called from several threads."""
        if route := self._routes.get(request.path):
            return route(request)
        if request.path.startswith("/api/v1/incidents/"):
            return self._incident(request.path.rpartition("/")[2])
        if request.path.startswith("/api/v1/jobs/"):
            return self._job_summary(unquote(request.path.rpartition("/")[2]))
        if request.path.startswith("/job/"):
            return self._job(unquote(request.path.removeprefix("/job/")))
        if request.path.startswith("/runbooks/"):
            return _runbook(request.path.removeprefix("/runbooks/"))
        return _problem(HTTPStatus.NOT_FOUND, f"nothing at {request.path}; see /")

    def _metrics(self, request: Request) -> Answer:
        body, headers = self._exposition.render(request.accept, request.accept_encoding)
        return HTTPStatus.OK, body, headers

    def _healthz(self, _request: Request) -> Answer:
        age = time.monotonic() - self._latest().at
        if age > self._stale_s:
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, f"the loop has not ticked for {age:.1f} s")
        return _json({"status": "ok"})

    def _readyz(self, request: Request) -> Answer:
        if self._latest().tick < 0:
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "the first collection is not done yet")
        return self._healthz(request)

    def _status(self, _request: Request) -> Answer:
        return _json(api.status(self._latest(), self._facts, time.monotonic()))

    def _incidents(self, request: Request) -> Answer:
        text = request.query.get("limit", [str(DEFAULT_LIMIT)])[-1]
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            return _problem(HTTPStatus.BAD_REQUEST, "limit must be a whole number")
        states, nested = request.query.get("state", ()), request.query.get("symptoms", ["0"])[-1] == "1"
        return _json(api.incident_list(self._latest(), states, min(int(text), MAX_LIMIT), nested=nested))

    def _ranks(self, request: Request) -> Answer:
        return _json(api.ranks(self._latest(), request.query.get("job", [""])[-1]))

    def _incident(self, id: str) -> Answer:
        latest = self._latest()
        found = api.find(latest, id)
        if found is None:
            return _problem(HTTPStatus.NOT_FOUND, "no incident with this id is remembered")
        return _json(api.incident_details(latest, found))

    def _index(self, request: Request) -> Answer:
        wanted = request.query.get("refresh", ["0"])[-1]
        refresh_s = next((seconds for seconds in REFRESH_S if str(seconds) == wanted), 0)
        latest, now = self._latest(), time.monotonic()

        def make() -> bytes:
            return node_page(latest, self._history, self._facts, refresh_s=refresh_s, now=now)

        return HTTPStatus.OK, self._pages.get(refresh_s, latest, now, make) or b"", HEADERS

    def _job_summary(self, id: str) -> Answer:
        summary = node_of_job(self._latest(), id, str(self._facts.get("node", "")), time.monotonic())
        if summary is None:
            return _problem(HTTPStatus.NOT_FOUND, "no run of this job is on this node")
        return HTTPStatus.OK, summary.model_dump_json().encode() + b"\n", {"Content-Type": JSON}

    def _job(self, id: str) -> Answer:
        latest, now = self._latest(), time.monotonic()
        node = str(self._facts.get("node", ""))

        def make() -> bytes | None:
            return job_page(
                latest, self._history, self._ledgers.of, id, node, now, self._job_nodes.of if self._job_nodes else None
            )

        body = self._pages.get(id, latest, now, make)
        if body is None:
            return _problem(HTTPStatus.NOT_FOUND, "no run of this job is on this node; see /")
        return HTTPStatus.OK, body, HEADERS


def _runbook(name: str) -> Answer:
    body = runbook_page(name) if name else runbook_list()
    if body is None:
        return _problem(HTTPStatus.NOT_FOUND, "no runbook has this name; see /runbooks/")
    return HTTPStatus.OK, body, HEADERS


def _json(value: object) -> Answer:
    return HTTPStatus.OK, api.encode(value), {"Content-Type": JSON}


def _problem(status: HTTPStatus, text: str) -> Answer:
    return status, api.encode({"error": text}), {"Content-Type": JSON}


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
            status, body, headers = _problem(HTTPStatus.UNAUTHORIZED, "this agent asks for a user and a password")
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
            status, body, headers = _problem(
                HTTPStatus.INTERNAL_SERVER_ERROR, "a bug in opsd; the agent's log has more"
            )
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
        """What was asked for. Raises ValueError if it is no valid address, or one with too many parameters."""
        url = urlsplit(self.path)
        return Request(
            url.path,
            parse_qs(url.query, max_num_fields=20),
            self.headers.get("Accept", ""),
            self.headers.get("Accept-Encoding", ""),
        )

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape a second is not worth a line."""


class Server(ThreadingHTTPServer):
    """Listens on ``listen`` ("127.0.0.1:9477", "[::1]:9477") at once, and answers from ``start`` to ``close``.

    ``web`` has certificate and passwords; without it everybody who reaches the address is answered, in the clear.

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
        """Answer requests with ``app``, those that have come in already included."""
        self.app = app
        threading.Thread(target=self.serve_forever, args=(POLL_S,), name="http", daemon=True).start()

    @property
    def address(self) -> str:
        """Host and port in use, for instance after listening on port 0."""
        host = f"[{self.server_name}]" if self.address_family == socket.AF_INET6 else self.server_name
        return f"{host}:{self.server_port}"

    def close(self) -> None:
        """Stop serving; whoever is still being answered is cut off."""
        self.shutdown()
        self._cut_off(opened_before=time.monotonic())
        self.server_close()
        self._threads_kept.shutdown(wait=False)

    def server_bind(self) -> None:
        """Bind without http.server's look-up of the host's name: a dead name server would delay the start."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; its handshake is left to the thread that will answer it."""
        connection, address = super().get_request()
        if self.web.context is not None:
            connection = self.web.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def verify_request(self, request: Any, _client_address: Any) -> bool:
        """Turn a connection away while as many as there are threads for are open."""
        with self._guard:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[request] = time.monotonic()
            return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Have a thread answer. Threads are kept: to start fifty at the same instant takes as long as fifty answers."""
        self._threads_kept.submit(self.process_request_thread, request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and forget it."""
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Every ``POLL_S``: cut off connections that have had their time."""
        self._cut_off(opened_before=time.monotonic() - CONNECTION_S)

    def _cut_off(self, *, opened_before: float) -> None:
        with self._guard:
            for connection in [c for c, since in self._open.items() if since < opened_before]:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that went away or was cut off is no error of ours."""
