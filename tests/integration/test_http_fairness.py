"""The agent's HTTP server under clients that take all they can get."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from opsd.agent.loop import Snapshot
from opsd.agent.web.admission import Budget, Budgets
from opsd.agent.web.app import App, Request
from opsd.agent.web.server import CONNECTION_S, HEADER_S, MAX_PER_PEER, Server
from tests.fakes.agent import SILENT
from tests.fakes.clock import eventually
from tests.integration.test_http_hardening import status

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


class StuckApp(App):
    """Its pages of jobs take as long as ``may_end`` is not set, as where a user's file system does not answer."""

    def __init__(self) -> None:
        snapshot = Snapshot(1, time.monotonic() + 1e6, time.time())
        super().__init__(lambda: snapshot, {"node": "n"}, stale_s=5.0)
        self.may_end = threading.Event()

    def __call__(self, request: Request):
        if request.path.startswith("/job/"):
            self.may_end.wait(60)
        return super().__call__(request)


@pytest.fixture
def app() -> Iterator[StuckApp]:
    app = StuckApp()
    yield app
    app.may_end.set()


@pytest.fixture
def server(app: StuckApp) -> Iterator[Server]:
    server = Server("127.0.0.1:0", SILENT)
    server.start(app)
    yield server
    server.close()


@pytest.fixture
def address(server: Server) -> tuple[str, int]:
    return "127.0.0.1", server.server_port


def test_many_slow_connections_fail_no_scrape(server: Server, address: tuple[str, int]) -> None:
    """Two hundred that send a byte now and then: 29 of 30 scrapes found no thread."""
    stop = threading.Event()

    def dawdle() -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(address, timeout=20) as connection:
                    connection.sendall(b"GET /metrics HTTP/1.1\r\n")
                    while not stop.wait(0.3):
                        connection.sendall(b"X")
            except OSError:
                stop.wait(0.05)

    for _ in range(200):
        threading.Thread(target=dawdle, daemon=True).start()
    try:
        assert eventually(lambda: server.connections >= MAX_PER_PEER)
        answers = [status(address, SCRAPE) for _ in range(30) if not stop.wait(0.05)]
    finally:
        stop.set()
    assert answers == [200] * 30
    assert server.refused["share"] > 0
    assert server.connections <= MAX_PER_PEER


def test_a_header_has_two_seconds_altogether(server: Server, address: tuple[str, int]) -> None:
    """Not for each byte, and less than the whole connection has."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 20:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert HEADER_S - 0.5 < time.monotonic() - began < 20
    assert server.refused["slow"] == 1


def test_answers_that_do_not_come_hold_up_no_scrape(address: tuple[str, int]) -> None:
    """As many as may be open wait for pages that are made from files of users."""
    waiting = []
    for _ in range(MAX_PER_PEER - 1):
        waiting.append(socket.create_connection(address, timeout=20))
        waiting[-1].sendall(b"GET /job/4242 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status(address, SCRAPE) == 200
    assert status(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    waiting[-1].settimeout(2 * CONNECTION_S)
    assert waiting[-1].recv(1) == b""  # it is over after some seconds
    for connection in waiting:
        connection.close()


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1\r\nHost: evil.example.com", 421), (b"HTTP/1.1\r\nHost: 127.0.0.1:9477", 200),
        (b"HTTP/1.0\r\nX: y", 200), (b"HTTP/1.1\r\nX: y", 400), (b"HTTP/1.1\r\nHost: localhost\r\nHost: evil", 400),
    ],
)  # fmt: skip
def test_only_own_names_are_answered(server: Server, address: tuple[str, int], head: bytes, expected: int) -> None:
    """A web page in somebody's browser that lets its name point to this node reads nothing."""
    assert status(address, b"GET /metrics " + head + b"\r\n\r\n") == expected
    assert server.refused["host"] == (expected == 421)


class LongApp(App):
    """Each answer but a scrape has 5 MB; with ``own`` each has its own."""

    def __init__(self, *, own: bool) -> None:
        snapshot = Snapshot(1, time.monotonic() + 1e6, time.time())
        super().__init__(lambda: snapshot, {"node": "n"}, stale_s=5.0)
        self._own, self._body = own, b"x" * 5_000_000

    def __call__(self, request: Request):
        if request.path == "/metrics":
            return super().__call__(request)
        return HTTPStatus.OK, self._body + b"y" if self._own else self._body, {}


@pytest.mark.parametrize("own", [True, False])
def test_answers_that_nobody_reads_have_a_limit(own: bool) -> None:
    """30 of 5 MB each were 150 MB; the same answer is there once, however many have not read it."""
    server = Server("127.0.0.1:0", SILENT)
    server.start(LongApp(own=own))
    waiting = []
    try:
        for _ in range(30):
            waiting.append(socket.socket())
            waiting[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            waiting[-1].connect(("127.0.0.1", server.server_port))
            waiting[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        readable = [select.select([each], [], [], 20)[0] for each in waiting]
        assert all(readable)
        assert eventually(lambda: server.refused["share"] > 0) if own else server.refused["share"] == 0
        assert status(("127.0.0.1", server.server_port), SCRAPE) == 200
    finally:
        for connection in waiting:
            connection.close()
        server.close()


@pytest.fixture
def poor(app: StuckApp) -> Iterator[Server]:
    """A server whose peers may connect three times, and have one answer."""
    budgets = Budgets(unlimited=(), connections=Budget(3, 1e-6), answers=Budget(1e-9, 1e-6))
    server = Server("127.0.0.1:0", SILENT, budgets=budgets)
    server.start(app)
    yield server
    server.close()


def test_a_peer_pays_for_what_is_made_for_it_alone(poor: Server) -> None:
    """Whoever has used up its processor time is refused such answers for a while, and no scrape."""
    odd = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text;version=7.0.0\r\n\r\n"
    asked = (b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n", odd, SCRAPE)
    assert [status(("127.0.0.1", poor.server_port), text) for text in asked] == [200, 429, 200]
    assert poor.refused["share"] == 1


def test_a_peer_that_connects_without_end_is_not_served(poor: Server) -> None:
    """Each connection takes the thread that serves all."""
    assert [status(("127.0.0.1", poor.server_port), SCRAPE) for _ in range(5)] == [200, 200, 200, 0, 0]
    assert poor.refused["share"] == 2
