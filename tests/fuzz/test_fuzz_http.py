"""Whatever arrives at the agent's port: the answer is no error of the server, and the next request is answered."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from opsd.agent.loop import Snapshot
from opsd.agent.web.app import App
from opsd.agent.web.server import Server
from opsd.collectors.base import Metric, Sample
from tests.fakes.collectors import SILENT
from tests.fakes.fuzzing import AMOUNTS, PIECES, changed, fuzz, numbers, texts
from tests.fakes.incidents import incident

VALUE = Metric("opsd_fake_value", "A value.", labels=("source",))
PATHS = (
    "/", "/metrics", "/healthz", "/readyz", "/api/v1/status", "/api/v1/ranks", "/api/v1/jobs/42", "/api/v1/incidents",
    "/api/v1/incidents/a", "/api/v1/statistics", "/job/42", "/runbooks/", "/runbooks/gpu_throttle",
)  # fmt: skip
KEYS = ("limit", "state", "symptoms", "job", "refresh", "x")
HEADERS = ("Host", "Accept", "Accept-Encoding", "Authorization", "Content-Length", "Transfer-Encoding", "Connection",
           "Expect", "Range", "Cookie", "Upgrade", "X-Opsd")  # fmt: skip
USUAL = (
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
    b"Accept: application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1\r\n"
    b"Accept-Encoding: gzip\r\nUser-Agent: Prometheus/2.53\r\n\r\n",
    b"GET /api/v1/incidents?limit=5&state=open HTTP/1.1\r\nHost: localhost:9477\r\nAuthorization: Basic dTpw\r\n\r\n",
    b"POST /api/v1/incidents HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello",
    b"GET /healthz HTTP/1.0\r\n\r\nGET /readyz HTTP/1.0\r\n\r\n",
)
SEEDS: tuple[bytes, ...] = (
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text;version=x;escaping=\xff\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain;version=1.0.0;escaping=nonsense\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: ;;;=,;q=\r\n\r\n",
    b"GET /api/v1/incidents?limit=" + b"9" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /job/%ed%a0%80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /?refresh=1e400&refresh=nan HTTP/1.1\r\nHost: localhost\r\n\r\n",
)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """An agent's server with a few series and incidents."""
    samples = tuple(Sample(VALUE, 1.0, (f"x{number}",)) for number in range(20))
    incidents = (incident("a"), incident("b", kind="gpu_throttle"))
    snapshot = Snapshot(1, time.monotonic() + 1e6, time.time(), samples=(samples,), incidents=incidents)
    server = Server("127.0.0.1:0", SILENT)
    server.start(App(lambda: snapshot, {"node": "n"}, stale_s=5.0))
    host, _, port = server.address.rpartition(":")
    yield host, int(port)
    server.close()


def statuses(address: tuple[str, int], request: bytes) -> list[int]:
    """The status of each answer to what is sent at once; then nothing more is sent."""
    answer = b""
    with socket.create_connection(address, timeout=30) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(1 << 16):
                answer += chunk
        except TimeoutError:
            raise
        except OSError:  # it has closed the connection before all was sent
            pass
    return [int(answer[9:12])] if answer.startswith(b"HTTP/1.") else []


def request(path: str, query: list[tuple[str, object]], headers: list[tuple[str, bytes]]) -> bytes:
    """A well-formed request line, whatever its values are."""
    values = "&".join(f"{key}={value}" for key, value in query).replace(" ", "+")
    target = f"{path}?{values}".encode(errors="replace").replace(b"\n", b"%0a").replace(b"\r", b"%0d")
    lines = [name.encode() + b": " + value.replace(b"\n", b"").replace(b"\r", b"") for name, value in headers]
    return b"GET " + target + b" HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


@AMOUNTS
def test_no_request_is_a_bug(amount: int, address: tuple[str, int]) -> None:
    """With odd values in the right places, or any bytes; several in one connection."""
    paths = st.sampled_from(PATHS) | st.tuples(st.sampled_from(PATHS), texts).map(lambda pair: f"{pair[0]}/{pair[1]}")
    queries = st.lists(st.tuples(st.sampled_from(KEYS), numbers | texts), max_size=3)
    values = st.sampled_from([*PIECES, b"*/*", b"gzip;q=0", b"text/plain;version=0.0.4;q=x"]) | st.binary(max_size=30)
    formed = st.builds(request, paths, queries, st.lists(st.tuples(st.sampled_from(HEADERS), values), max_size=4))
    count = 0

    def ask(content: bytes) -> None:
        nonlocal count
        assert all(100 <= status < 500 or status in (501, 505) for status in statuses(address, content))
        count += 1
        if count % 20 == 0:
            assert statuses(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") == [200]

    fuzz(ask, formed | changed(*USUAL), amount, SEEDS)
