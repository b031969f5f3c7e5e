"""Names under which an agent answers."""

from __future__ import annotations

import pytest

from opsd.agent.web.admission import Hosts

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
