"""Addresses of other launchers by name: asked for when first needed, in a thread, and kept.

A launcher calls few others, so it asks the name service for few names, however many nodes the run has. An address that
was found is used until a newer answer comes: a name service that is down or slow ends no connection that worked.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address

from opsd.launch.io.loop import Timers

FRESH_S = 60.0
"""An older answer is used, and asked for again meanwhile."""
RETRY_S = 5.0
"""After an error the name is not asked for again before this."""


def lookup(host: str) -> str:
    """The address of ``host``, one of IPv4 if it has several. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is empty or longer than 63 characters
        raise OSError(errno.EINVAL, "this cannot be a host name") from error
    return min((str(entry[4][0]) for entry in found), key=lambda address: ":" in address)


def host_is_up(host: str, ports: Sequence[int], timeout_s: float = 2.0) -> bool:
    """Whether ``host`` answers on one of ``ports``, if only to refuse. True if it has no address."""
    try:
        address = lookup(host)
    except OSError:
        return True
    for port in ports:
        try:
            socket.create_connection((address, port), timeout_s).close()
        except ConnectionError:
            return True
        except OSError:
            continue
        return True
    return False


def is_address(host: str) -> bool:
    """Whether ``host`` is an IP address, for which nobody has to be asked."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


Found = Callable[[str | None], None]


@dataclass(slots=True)
class _Entry:
    address: str = ""
    asked_at: float = 0.0
    asking: bool = False
    waiting: list[Found] = field(default_factory=list)


class AddressBook:
    """``lookup`` raises OSError; ``failed`` is called with the host and the error if no address is known."""

    def __init__(
        self, loop: Timers, failed: Callable[[str, OSError], None], lookup: Callable[[str], str] = lookup
    ) -> None:
        self._loop = loop
        self._failed = failed
        self._lookup = lookup
        self._entries: dict[str, _Entry] = {}

    def find(self, host: str, found: Found) -> None:
        """Call ``found`` with the address of ``host``, at once if it is known; with None if there is none now."""
        if is_address(host):
            found(host)
            return
        entry = self._entries.setdefault(host, _Entry(asked_at=-FRESH_S))
        age_s = self._loop.time() - entry.asked_at
        if not entry.asking and age_s >= (FRESH_S if entry.address else RETRY_S):
            entry.asking, entry.asked_at = True, self._loop.time()
            self._loop.run_in_thread(partial(self._lookup, host), partial(self._answered, host, entry))
        if entry.address:
            found(entry.address)
        elif entry.asking:
            entry.waiting.append(found)
        else:
            found(None)

    def _answered(self, host: str, entry: _Entry, answer: str | OSError) -> None:
        entry.asking, entry.asked_at = False, self._loop.time()
        if not isinstance(answer, OSError):
            entry.address = answer
        elif not entry.address:
            self._failed(host, answer)
        waiting, entry.waiting = entry.waiting, []
        for found in waiting:
            found(entry.address or None)
