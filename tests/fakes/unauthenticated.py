"""Clients that never authenticate: ``python unauthenticated.py ADDRESS PORT IDLE [SOURCES]``, until killed.

IDLE connections are held open, say nothing, and are opened again when they are closed. Meanwhile others are opened and
closed one by one, as fast as possible. They come from SOURCES addresses of the loopback network. Prints twice a second
how many were made.
"""

from __future__ import annotations

import errno
import itertools
import selectors
import socket
import sys
import time

IP_BIND_ADDRESS_NO_PORT = 24


def connect(target: tuple[str, int], source: str) -> socket.socket:
    """A connection that is being made; a port is chosen for it then, so that there are enough of them."""
    connection = socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET)
    connection.setblocking(False)
    if source:
        connection.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        connection.bind((source, 0))
    if (error := connection.connect_ex(target)) not in (0, errno.EINPROGRESS):
        raise OSError(error, "cannot connect")
    return connection


def main() -> None:
    """Call and call again."""
    target, idle = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
    sources = [f"127.77.0.{number}" for number in range(1, int(sys.argv[4]) + 1)] if len(sys.argv) > 4 else [""]
    selector, source = selectors.DefaultSelector(), itertools.cycle(sources)
    held = made = 0
    shown = time.monotonic()
    while True:
        for _ in range(50):
            while held < idle:
                selector.register(connect(target, next(source)), selectors.EVENT_READ)
                held += 1
                made += 1
            connect(target, next(source)).close()
            made += 1
        for key, _ in selector.select(0.0):
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
            held -= 1
        if time.monotonic() > shown + 0.5:
            shown = time.monotonic()
            print(made, flush=True)


if __name__ == "__main__":
    main()
