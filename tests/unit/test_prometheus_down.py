"""A Prometheus or Alertmanager that is down, refuses, or is something else: one sentence with its address."""

from __future__ import annotations

import pytest

from opsd.preflight.base import CouldNotRunError
from opsd.preflight.checks.run_alerts import Alertmanager, alerts_of
from tests.fakes.answering import answering


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "answered with status 503"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "answered with status 401"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "does not answer like"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"data":null}', "does not answer like"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer (RemoteProtocolError)"),
    ],
)
def test_what_answers_need_not_be_prometheus(answer: bytes, said: str) -> None:
    """A proxy that asks for a password, a page of a portal, an older API, another service."""
    with answering(answer) as url, pytest.raises(CouldNotRunError) as caught:
        alerts_of(url)
    assert url in str(caught.value) and said in str(caught.value)
    with answering(answer) as url, pytest.raises(CouldNotRunError) as caught:
        Alertmanager(url).listed("test", "true")
    assert url in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid", "prometheus:9090", "http://[::"])
def test_nobody_there_is_one_sentence(url: str) -> None:
    """Down, not resolved, or no address at all."""
    with pytest.raises(CouldNotRunError, match="is the address right"):
        alerts_of(url)
