"""Who is at the other end of a connection."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from opsd.agent.web.admission import Budget, peer_of
from tests.fakes.clock import FakeClock, eventually


@contextmanager
def connected(host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends, the accepted one last."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            yield client, accepted


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.7", "::1"])
def test_a_connection_from_this_machine_is_its_users(host: str) -> None:
    """Whatever address of the machine it comes from."""
    try:
        with connected(host) as (_, accepted):
            assert peer_of(accepted) == f"uid {os.geteuid()}"
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_each_user_is_a_peer_of_its_own() -> None:
    """The kernel says who has connected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = f"import socket; s = socket.create_connection({listener.getsockname()!r}); input()"
        with subprocess.Popen(
            ["/usr/bin/env", "python3", "-c", program],
            env={"PATH": "/usr/bin"},
            user=65534,
            group=65534,
            cwd="/",
            stdin=subprocess.PIPE,
        ) as client:
            listener.settimeout(20)
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                pytest.skip("other users cannot run this Python")
            with accepted:
                assert peer_of(accepted) == "uid 65534"
            client.communicate(b"\n")


def test_a_socket_that_is_closed_already_is_nobodys() -> None:
    """The kernel says uid 0 of it, which would let anybody use up root's share."""
    with connected("127.0.0.1") as (client, accepted):
        client.sendall(b"x")
        client.close()
        assert eventually(lambda: peer_of(accepted) == "this machine")


def test_a_peer_has_some_attempts_at_once_and_then_one_a_second() -> None:
    """Others are not concerned."""
    clock = FakeClock()
    attempts = Budget(10, 1.0, clock=clock.monotonic)
    assert [attempts.allow("a") for _ in range(12)] == [True] * 10 + [False] * 2
    assert attempts.allow("b")
    clock.advance(1.0)
    assert [attempts.allow("a"), attempts.allow("a")] == [True, False]
