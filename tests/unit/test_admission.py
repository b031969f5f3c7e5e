"""Who is at the other end of a connection of the agent, and how much of its time they have."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from opsd.agent.web.admission import Budget, Hosts, peer_of
from tests.fakes.clock import FakeClock, eventually

# Who is at the other end of a connection.


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


# Processor time that peers of the HTTP server have.


def test_a_peer_has_some_time_at_once_and_then_a_share() -> None:
    """Who is in debt waits until a tenth of a core has paid it; others are not concerned."""
    clock = FakeClock()
    budget = Budget(2.0, 0.1, clock=clock.monotonic)
    budget.charge("a", 1.9)
    assert budget.affords("a")
    budget.charge("a", 1.1)
    assert [budget.affords(peer) for peer in "ab"] == [False, True]
    clock.advance(9.9)
    assert not budget.affords("a")
    clock.advance(0.2)
    assert budget.affords("a")


def test_it_remembers_a_bounded_number_of_peers() -> None:
    """A user may have thousands of user ids. Those who asked longest ago are forgotten first."""
    budget = Budget(1.0, 0.1, clock=FakeClock().monotonic)
    for number in range(Budget.MAX_PEERS + 1):
        budget.charge(f"uid {number}", 5.0)
    assert [budget.affords(f"uid {number}") for number in (0, 1, Budget.MAX_PEERS)] == [True, False, False]


# Names under which an agent answers.


HOSTS = Hosts(("node-17", "Node-17.cluster"))


@pytest.mark.parametrize(
    "host",
    ["node-17", "NODE-17:9477", "node-17.cluster.", "node-17.cluster:9477", "localhost:9477", "127.0.0.1:1", "10.0.0.7",
     "[::1]:9477", "[fe80::1%25eth0]", "[2001:db8::1]", "", "node-17:"],
)  # fmt: skip
def test_own_names_and_addresses_are_answered(host: str) -> None:
    """With and without a port; no Host at all comes from no browser."""
    assert HOSTS.admit(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example.com", "node-17.evil.example.com:9477", "node-18", "localhost.evil.com", "127.0.0.1.evil.com", "[",
     "1", "127.1", "evil.com:[::1]", "127.0.0.1%evil.com", "node-17@evil.com", "\xff"],
)  # fmt: skip
def test_other_names_are_not(host: str) -> None:
    """A page that lets its own name point here is not to read the agent through somebody's browser."""
    assert not HOSTS.admit(host)


def test_a_name_may_be_added() -> None:
    """That in DNS is known later than the others."""
    hosts = Hosts()
    assert not hosts.admit("node-17.cluster")
    hosts.add("node-17.cluster")
    assert hosts.admit("node-17.cluster")
