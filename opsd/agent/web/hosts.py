"""The names under which an agent answers, so that a page of another site cannot read it through a visitor's browser.

Such a page points its own name at this node's address (DNS rebinding); the browser then sends that name as ``Host``.
An address is never such a name. Over TLS the certificate decides instead.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress


class Hosts:
    """Names that are answered: addresses, localhost, and ``names``. Case does not matter. Thread-safe."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset({"localhost", *(_plain(name) for name in names)})

    def admit(self, host: str) -> bool:
        """Whether a request with this ``Host`` is answered; without one it comes from no browser."""
        name = _plain(host)
        return not host.strip() or name in self._names or _is_address(name)

    def add(self, name: str) -> None:
        """Answer to this name as well."""
        self._names |= {_plain(name)}


def own_hosts(node: str, names: Iterable[str]) -> Hosts:
    """The names of this machine, of ``node``, and ``names``. The name in DNS is added once it is known."""
    own = os.uname().nodename
    hosts = Hosts((node, own, own.partition(".")[0], *names))

    def ask() -> None:
        with suppress(OSError, UnicodeError):
            for *_, name, _address in socket.getaddrinfo(own, None, flags=socket.AI_CANONNAME):
                hosts.add(name)

    threading.Thread(target=ask, name="own-names", daemon=True).start()
    return hosts


def _plain(host: str) -> str:
    """``host`` in lower case, without its port and the dot of a fully qualified name."""
    name, colon, port = host.strip().lower().rpartition(":")
    if not colon or not ((port.isascii() and port.isdigit()) or not port) or (":" in name and not name.endswith("]")):
        name = host.strip().lower()
    return name.removeprefix("[").removesuffix("]").removesuffix(".")


def _is_address(name: str) -> bool:
    for family, address in ((socket.AF_INET, name), (socket.AF_INET6, name.partition("%")[0])):
        with suppress(OSError, ValueError):
            socket.inet_pton(family, address)
            return True
    return False
