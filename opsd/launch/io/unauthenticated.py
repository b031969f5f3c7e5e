"""Connections on which nobody has proven yet who it is: few, so that they cost nothing, and the idle ones go first.

File descriptors are few: what the launcher needs for its own work is kept from those who merely connect.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from opsd.launch.io.connection import Connection

SILENT_PER_ADDRESS = 4
"""Connections of one address that have said nothing; a launcher greets as soon as it is connected."""
OWN_DESCRIPTORS = 512
"""What a launcher needs beside its connections: the pipes, logs and pidfds of its ranks."""
_KEPT = 64
_MOST = 64


class UnauthenticatedConnections:
    """In the order in which they came. Whoever is new is let in; for it the oldest of those that say nothing goes.

    ``launchers`` says how many there are in the run: so many more may be proving who they are, since all of them call
    at once when this one begins to lead.
    """

    def __init__(self, launchers: Callable[[], int]) -> None:
        self._launchers = launchers
        self._all: dict[Connection, str] = {}

    def add(self, connection: Connection, address: str) -> bool:
        """Let one in; False if another one had to go for it."""
        leaving = self._leaving(address)
        self._all[connection] = address
        if leaving is not None:
            leaving.close()
        return leaving is None

    def discard(self, connection: Connection) -> None:
        """Forget one that has proven itself or is closed."""
        self._all.pop(connection, None)

    def close_silent(self) -> None:
        """Close those that have said nothing."""
        for connection in [each for each in self._all if not each.greeted]:
            connection.close()

    def close_all(self) -> None:
        """Close all of them."""
        for connection in list(self._all):
            connection.close()

    def _leaving(self, address: str) -> Connection | None:
        silent = [each for each in self._all if not each.greeted]
        of_this_address = [each for each in silent if self._all[each] == address]
        if len(of_this_address) >= SILENT_PER_ADDRESS:
            return of_this_address[0]
        full = len(self._all) >= _most() + self._launchers()
        if silent and (full or len(silent) >= _most()):
            return silent[0]
        return next(iter(self._all)) if full else None


def raise_descriptor_limit(launchers: int) -> None:
    """Raise the soft limit to what a launcher needs that is connected with so many: two connections to each."""
    needed = 2 * launchers + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def _most() -> int:
    """How many connections there may be on which nobody has proven who it is: a few, an eighth of a low limit."""
    return min(_MOST, max(1, _limit() // 8))


def is_reserved(descriptor: int) -> bool:
    """Whether a new descriptor is one of the last, kept for the launcher's own work. The lowest free one is given."""
    limit = _limit()
    return descriptor >= limit - min(_KEPT, limit // 4)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30
