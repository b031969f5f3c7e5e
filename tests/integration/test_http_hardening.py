"""The agent's HTTP server against clients that mean harm, or do not know better."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opsd.agent.loop import Snapshot
from opsd.agent.web.app import App
from opsd.agent.web.server import CONNECTION_S, Server
from opsd.collectors.base import Metric, Sample
from tests.fakes.agent import SILENT

VALUE = Metric("opsd_fake_value", "A value.", labels=("source",))
PATHS = ("/", "/metrics", "/healthz", "/api/v1/incidents", "/api/v1/ranks", "/job/4242", "/runbooks/gpu_throttle")


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """A server whose metrics are some megabytes."""
    samples = tuple(Sample(VALUE, 1.0, (f"{'x' * 100}{number}",)) for number in range(30_000))
    snapshot = Snapshot(1, time.monotonic() + 1e6, time.time(), samples=(samples,))
    server = Server("127.0.0.1:0", SILENT)
    server.start(App(lambda: snapshot, {"node": "n"}, stale_s=5.0))
    host, _, port = server.address.rpartition(":")
    yield host, int(port)
    server.close()


def exchange(address: tuple[str, int], request: bytes) -> bytes:
    """Send ``request`` and nothing more; the beginning of the answer."""
    with socket.create_connection(address, timeout=20) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096)
        except OSError:
            return b""


def status(address: tuple[str, int], request: bytes) -> int:
    """The status of the answer, 0 if there was none."""
    words = exchange(address, request).split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0


lines = st.binary(max_size=200).filter(lambda text: b"\n" not in text and b"\r" not in text)


@settings(max_examples=150)
@given(
    path=lines.map(lambda text: b"/" + text),
    headers=st.lists(st.tuples(lines, lines), max_size=8),
    method=st.sampled_from([b"GET", b"HEAD"]),
)
@example(path=b"/?limit=\xff%ff&refresh=%00", headers=[], method=b"GET")
@example(path=b"//[", headers=[], method=b"GET")
@example(path=b"http://[::1/metrics", headers=[(b"Host", b"[")], method=b"GET")
@example(path=b"/metrics", headers=[(b"Accept", b";q=\xff," * 30), (b"Accept-Encoding", b"gzip;q=x")], method=b"GET")
@example(path=b"/metrics", headers=[(b"Accept", b"application/openmetrics-text;version=x")], method=b"GET")
@example(path=b"/metrics", headers=[(b"Accept", b"text/plain;version=1..0")], method=b"GET")
@example(path=b"/metrics", headers=[(b"Accept", b"application/openmetrics-text;version=1\xb2")], method=b"GET")
@example(path=b"/api/v1/incidents?" + b"a&" * 50, headers=[], method=b"GET")
@example(path=b"/api/v1/incidents?limit=" + "²".encode(), headers=[], method=b"GET")
def test_no_request_is_a_bug(address: tuple[str, int], path: bytes, headers, method: bytes) -> None:
    """Whatever comes in, the answer is never an error of the server, and the next one is answered."""
    text = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    assert 0 < status(address, method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + text + b"\r\n") < 500
    assert status(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200


@settings(max_examples=100)
@given(request=st.binary(max_size=400))
def test_bytes_that_are_no_request_do_no_harm(address: tuple[str, int], request: bytes) -> None:
    """Not even HTTP."""
    exchange(address, request + b"\r\n\r\n")
    assert status(address, b"GET /healthz HTTP/1.0\r\n\r\n") == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/runbooks/../server.py", "/runbooks/%00",
        "/job/%00", "/job/../api",
        "/runbooks/..%2f..%2fetc%2fpasswd", "file:///etc/passwd", "/api/v1/incidents/%2e%2e%2fconfig",
    ],
)  # fmt: skip
def test_no_path_leads_to_a_file(address: tuple[str, int], path: str) -> None:
    """The server has no files to give: what it does not know is 404."""
    assert status(address, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "get"])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_can_be_changed(address: tuple[str, int], method: str, path: str) -> None:
    """There are no control endpoints, and no method but those that read."""
    assert status(address, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) == 501


def test_headers_beyond_all_measure_are_refused(address: tuple[str, int]) -> None:
    """A line of a megabyte, and ten thousand headers."""
    assert status(address, b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") in (0, 431)
    assert status(address, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n") in (0, 431)
    assert status(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200


def test_fifty_at_once_are_all_answered(address: tuple[str, int]) -> None:
    """Several Prometheis, a dashboard on a wall and everybody who looks after an alert."""
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: status(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), range(50)))
    assert answers == [200] * 50


@pytest.mark.slow
def test_scrapers_that_never_read_are_cut_off(address: tuple[str, int]) -> None:
    """Some that ask for megabytes and take none hold up neither the others nor the agent."""
    deaf = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deaf.append(connection)
    began = time.monotonic()
    assert status(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    assert time.monotonic() - began < CONNECTION_S
    time.sleep(CONNECTION_S + 1)
    for connection in deaf:
        connection.settimeout(20)
        got = 0
        while chunk := connection.recv(1 << 20):
            got += len(chunk)
        assert got < 3_000_000
        connection.close()
