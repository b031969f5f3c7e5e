"""Connections on which nobody has proven yet who it is: few, so that they cost nothing, and the idle ones go first."""

from __future__ import annotations

from opsd.launch.io import descriptors
from opsd.launch.io.connection import Connection

SILENT_PER_ADDRESS = 4
"""Connections of one address that have said nothing; a launcher greets as soon as it is connected."""


class Strangers:
    """In the order in which they came. Whoever is new is let in; for it the oldest of those that say nothing goes."""

    def __init__(self) -> None:
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
        if len(self._all) >= descriptors.for_strangers():
            return silent[0] if silent else next(iter(self._all))
        return None
