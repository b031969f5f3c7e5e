"""Who is at the other end of a connection within this node."""

from __future__ import annotations

import os
import socket
import time

import pytest

from opsd.collectors.lib.listener import (
    UntrustedError,
    check_owner,
    connect,
    listener_uid,
    peer_uid,
    trusted_uids,
)

OWN = frozenset({os.geteuid()})
OTHERS = frozenset({os.geteuid() + 1})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_owner_is_known_once_the_connection_is_accepted(host: str) -> None:
    """Before, the kernel has no owner to tell; the listener's it knows from the start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server, socket.socket(family) as client:
        client.connect(server.getsockname())
        assert (peer_uid(client), listener_uid(client)) == (None, os.geteuid())
        with server.accept()[0]:
            assert peer_uid(client) == os.geteuid()
            server.close()
            assert (peer_uid(client), listener_uid(client)) == (os.geteuid(), None)


def test_one_socket_for_both_families_is_known_by_either() -> None:
    """An exporter that listens on all addresses is reached as 127.0.0.1."""
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client,
        server.accept()[0],
    ):
        assert (peer_uid(client), listener_uid(client)) == (os.geteuid(), os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a socket is given to another user")
def test_a_listener_is_no_excuse_for_another_owner_of_the_connection() -> None:
    """Who accepted counts: a connection may outlive its listener, and somebody else listen there since."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        os.fchown(accepted.fileno(), 65534, -1)
        with pytest.raises(UntrustedError, match=r"at 127\.0\.0\.1:\d+ belongs to user 65534, who is not believed"):
            check_owner(client, OWN, time.monotonic())


def test_what_belongs_to_nobody_in_time_is_not_believed() -> None:
    """A listener that does not accept is waited for as long as was asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with pytest.raises(TimeoutError):
            connect(host, port, OWN, 0.05)
        with pytest.raises(UntrustedError):
            connect(host, port, OTHERS, 0.05)
    with pytest.raises(ConnectionRefusedError):
        connect(host, port, OWN, 0.05)


def test_users_are_named_or_numbered() -> None:
    """Root and the own user always are; one that the node does not know is nobody."""
    assert trusted_uids(()) == {0, os.geteuid()}
    assert trusted_uids(("root", "65534", "nobody-of-that-name")) == {0, os.geteuid(), 65534}
