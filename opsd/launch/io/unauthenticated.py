"""Connections that are not authenticated yet: limited in number, and the idle ones are closed first.

They must not use up the file descriptors that the launcher needs for its own work.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from opsd.launch.io.connection import Connection

SILENT_PER_ADDRESS = 4
"""Silent connections per address; a launcher greets as soon as it is connected."""
OWN_DESCRIPTORS = 512
"""Descriptors that a launcher needs besides its connections: the pipes, logs and pidfds of its ranks."""
_KEPT = 64
_MOST = 64


class UnauthenticatedConnections:
    """In order of arrival. A new connection is accepted; if there are too many, the oldest silent one is closed for it.

    ``launchers`` returns the size of the run: that many more may be authenticating, since all launchers connect at once
    when this one begins to lead.
    """

    def __init__(self, launchers: Callable[[], int]) -> None:
        self._launchers = launchers
        self._all: dict[Connection, str] = {}

    def add(self, connection: Connection, address: str) -> bool:
        """Add a connection; False if another one was closed for it."""
        leaving = self._leaving(address)
        self._all[connection] = address
        if leaving is not None:
            leaving.close()
        return leaving is None

    def discard(self, connection: Connection) -> None:
        """Remove one that is authenticated or closed."""
        self._all.pop(connection, None)

    def close_silent(self) -> None:
        """Close those that have not sent anything."""
        for connection in [each for each in self._all if not each.greeted]:
            connection.close()

    def close_all(self) -> None:
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
    """Raise the soft limit of descriptors to what a run of that size needs: two connections per launcher."""
    needed = 2 * launchers + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def _most() -> int:
    """How many unauthenticated connections there may be: an eighth of a low limit."""
    return min(_MOST, max(1, _limit() // 8))


def is_reserved(descriptor: int) -> bool:
    """Whether a new descriptor is one of the last, reserved for the launcher. The kernel gives out the lowest."""
    limit = _limit()
    return descriptor >= limit - min(_KEPT, limit // 4)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30
